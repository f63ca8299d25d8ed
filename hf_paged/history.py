"""Which tokens a cache holds, so that `generate` can take it up again at any earlier point.

Contract: after a `generate` call over a PagedCache the cache knows its tokens; before the next call it is cut back
to what the new prompt shares with them. A cache can so be continued twice, or by a shorter prompt, and the text is
that of a cache made anew. Nothing is ever reused that plain `generate` would not reuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .cache import PagedCache
from .lazy import left_padding
from .padding import continued

# Tensors of a call that do not enter the keys and values, or that are compared column by column.
_COMPARED = ("input_ids", "inputs", "attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")


@dataclass
class TokenHistory:
    """What a cache was computed from, in the order of its columns.

    Attributes:
        token_ids: `[batch, columns]`.
        mask: `[batch, columns]` bool, which columns were real.
        order: `[batch, columns of the prompt]`, how those were moved against the caller's (see padding.Compaction),
            or None.
        has_more: whether more than tokens and a mask went in (images, positions, ...), which nobody compares.
    """

    token_ids: torch.Tensor
    mask: torch.Tensor
    order: torch.Tensor | None = None
    has_more: bool = False

    @property
    def length(self) -> int:
        """Columns whose tokens are known."""
        return self.token_ids.shape[1]

    def first(self, columns: int) -> TokenHistory:
        """The history of a cache that was cut to its first columns."""
        return TokenHistory(self.token_ids[:, :columns], self.mask[:, :columns], self.order, self.has_more)

    def select(self, index: Sequence[int]) -> TokenHistory:
        """The history of a cache whose row i is what row `index[i]` was."""
        order = None if self.order is None else self.order[index]
        return TokenHistory(self.token_ids[index], self.mask[index], order, self.has_more)


def takes_more(kwargs: Mapping) -> bool:
    """Whether a call gives the model more than tokens and a mask."""
    return any(
        isinstance(value, torch.Tensor) and name not in _COMPARED and not name.endswith("_token_id")
        for name, value in kwargs.items()
    )


def remember(
    cache: PagedCache,
    sequences: torch.Tensor | None,
    mask: torch.Tensor | None,
    order: torch.Tensor | None,
    has_more: bool,
) -> None:
    """Note the tokens of a cache after a `generate` call.

    Args:
        sequences: `[rows, columns]` as the model saw them; None where the cache's rows do not hold the returned texts
            (beams) or more than tokens went in, so that only the order of the columns is known.
        mask: `[rows, prompt columns]` as the model saw it; None where every column was real.
        order: `[prompts, prompt columns]`, how those were moved, or None.
        has_more: whether more than tokens and a mask went in.
    """
    earlier, cache.history = cache.history, None
    length, rows = cache.get_seq_length(), cache.num_rows
    known = sequences is not None and 0 < length <= sequences.shape[1] and rows == sequences.shape[0]
    if not known and order is None:
        return
    real = torch.ones(rows, length, dtype=torch.bool)
    if mask is not None and mask.shape[0] == rows:
        columns = min(length, mask.shape[1])
        real[:, :columns] = mask[:, :columns].cpu().bool()
    if order is not None:
        order = order.repeat_interleave(rows // len(order), dim=0)
    token_ids = sequences[:, :length].clone() if known else torch.empty(rows, 0, dtype=torch.int64)
    has_more = has_more or (earlier is not None and earlier.has_more)
    cache.history = TokenHistory(token_ids, real, order, has_more)


def usable_past(
    cache: PagedCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[int, torch.Tensor | None]:
    """Columns of a cache that a prompt can build on, and how those were moved. A cache that cannot serve is cleared.

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
    if order is not None:
        held = min(order.shape[1], columns, past)
        order = order[:, :held]
        fits = not (order >= held).any()  # else the prompt, or a crop, ends inside what was moved
        was = cache.history.mask[:, :held]
        now = torch.ones_like(was)
        fits = fits and (attention_mask is None or len(attention_mask) == len(order))
        if fits and attention_mask is not None:
            now = attention_mask.to(was.device).bool().gather(1, order.to(was.device))
        fits = fits and torch.equal(now, was)  # what was moved together as padding must be padding still
    if fits and attention_mask is not None and not cache.sees_every_column:
        # A window counts columns, and a recurrent state has read them all: neither can skip masked ones.
        mask = attention_mask
        if order is not None:
            mask = mask.gather(1, continued(order.to(mask.device), columns))
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


def rewind(cache: PagedCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, has_more: bool) -> None:
    """Cut a cache back to the columns that it shares with a prompt, so that a token is left to compute.

    Args:
        input_ids: `[batch, columns]`, the whole text.
        attention_mask: `[batch, columns]` or None.
        has_more: whether the call gives the model more than these.
    Raises:
        ValueError: the cache holds as much as the prompt or more, and its tokens are not known.
    """
    past, columns = cache.get_seq_length(), input_ids.shape[1]
    history = cache.history
    if history is None or history.token_ids.shape != (input_ids.shape[0], past):
        if past >= columns:
            raise ValueError(
                f"past_key_values holds {past} tokens and input_ids has {columns}: no token is left to compute; "
                "pass the whole text, cached part included, or crop the cache"
            )
        return
    common = _common_columns(history, input_ids, attention_mask)
    if common == past:
        return
    if has_more or history.has_more:  # images and the like are not compared: compute anew
        cache.clear()
        return
    try:
        cache.crop(common - past)
    except (RuntimeError, ValueError, NotImplementedError):
        cache.clear()  # a window or a recurrent state cannot go back: compute anew


def _common_columns(history: TokenHistory, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """Columns whose keys and values this prompt would give again, at most all but its last."""
    common = min(history.length, input_ids.shape[1] - 1)
    device = input_ids.device
    was = history.mask[:, :common].to(device)
    is_now = torch.ones_like(was) if attention_mask is None else attention_mask[:, :common].bool()
    differs = (history.token_ids[:, :common].to(device) != input_ids[:, :common]) & is_now
    differs |= is_now & ~was
    # What is masked only now has been read by the columns after it; it may go where none of those is real.
    real_after = is_now.flip(1).cummax(dim=1).values.flip(1)
    differs |= was & ~is_now & real_after
    first = differs.any(dim=0).nonzero()
    return int(first[0, 0]) if len(first) else common


def settle(cache: PagedCache, entry_length: int) -> None:
    """After a call that failed: bring every layer back to columns that all hold and whose tokens are known.

    Args:
        entry_length: columns that the cache held before the call.
    """
    lengths = [layer.get_seq_length() for layer in cache.paged_layers]
    length = min(lengths, default=0)
    length = min(length, entry_length if cache.history is None else cache.history.length)
    try:
        if len(cache.paged_layers) < len(cache.layers) or not cache.cut(length):
            cache.clear()
    except RuntimeError:
        cache.clear()
