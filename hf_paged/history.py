"""Which tokens a cache holds, so that `generate` can take it up again at any earlier point.

Contract: after a `generate` call over a PagedCache the cache knows its tokens; before the next call it is cut back
to what the new prompt shares with them. A cache can so be continued twice, or by a shorter prompt, and the text is
that of a cache made anew. Nothing is ever reused that plain `generate` would not reuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cache import PagedCache
from .lazy import left_padding
from .padding import continued


@dataclass
class TokenHistory:
    """The tokens of a cache, in the order of its columns.

    Attributes:
        token_ids: `[batch, columns]`.
        order: how those columns were moved against the caller's (see padding.Compaction), or None.
    """

    token_ids: torch.Tensor
    order: torch.Tensor | None = None


def remember(cache: PagedCache, sequences: torch.Tensor, order: torch.Tensor | None) -> None:
    """Note the tokens of a cache after `generate` returned `sequences` (as the model saw them)."""
    cache.history = None
    length = cache.get_seq_length()
    if 0 < length <= sequences.shape[1] and cache.num_rows == sequences.shape[0]:
        cache.history = TokenHistory(sequences[:, :length].clone(), order)


def usable_past(
    cache: PagedCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[int, torch.Tensor | None]:
    """Columns of a cache that a prompt can build on, and how those were moved. A cache that cannot serve is reset.

    Args:
        input_ids: `[batch, columns]`, the whole text or its new tokens.
        attention_mask: `[batch, columns of the whole text]` or None.
    Raises:
        ValueError: the cache cannot serve, and without the whole text it cannot be made anew.
    """
    past = cache.get_seq_length()
    order = cache.history.order if cache.history is not None else None
    if not past:
        return 0, None
    columns = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
    fits = True
    if order is not None and order.shape[1] > columns:  # the prompt ends inside what was moved
        order = order[:, :columns]
        fits = not (order >= columns).any()
    if fits and attention_mask is not None and not cache.sees_every_column:
        # A window counts columns, and a recurrent state has read them all: neither can skip masked ones.
        mask = attention_mask if order is None else attention_mask.gather(1, continued(order, columns))
        new = torch.sort(mask[:, past:].int(), dim=1).values  # as Compaction will move it
        fits = left_padding(torch.cat([mask[:, :past].int(), new], dim=1), columns) is not False
    if fits:
        return past, order
    if input_ids.shape[1] < columns:
        raise ValueError(
            f"attention_mask has holes after a row's first token, past_key_values holds {past} columns, and a sliding "
            "window or a recurrent state cannot skip masked ones; pass the whole text as input_ids"
        )
    cache.clear()
    return 0, None


def rewind(cache: PagedCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Cut a cache back to the columns that it shares with a prompt, so that a token is left to compute.

    Args:
        input_ids: `[batch, columns]`, the whole text.
        attention_mask: `[batch, columns]` or None; padding may differ.
    Raises:
        ValueError: the cache holds as much as the prompt or more, and its tokens are not known.
    """
    past, columns = cache.get_seq_length(), input_ids.shape[1]
    history = cache.history
    known = history is not None and history.token_ids.shape == (input_ids.shape[0], past)
    if not known:
        if past >= columns:
            raise ValueError(
                f"past_key_values holds {past} tokens and input_ids has {columns}: no token is left to compute; "
                "pass the whole text, cached part included, or crop the cache"
            )
        return
    common = min(past, columns - 1)
    differs = history.token_ids[:, :common].to(input_ids.device) != input_ids[:, :common]
    if attention_mask is not None:
        differs &= attention_mask[:, :common].bool()
    first = differs.any(dim=0).nonzero()
    common = int(first[0, 0]) if len(first) else common
    if common == past:
        return
    try:
        cache.crop(common - past)
    except (RuntimeError, ValueError, NotImplementedError):
        cache.clear()  # a window or a recurrent state cannot go back: compute anew
