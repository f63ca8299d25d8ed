"""How likely the tokens behind a context are, for many contexts, through the paged cache.

Contract: a span is a context and the tokens that follow it; the latter are scored, each seeing all before it, read from
the blocks. Nothing is kept of the context's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hf_paged import PagedCacheConfig

from .divergence import Compared, compare
from .lockstep import run_windows

Span = tuple[Sequence[int], Sequence[int]]


def score_spans(
    model,
    spans: Sequence[Span],
    configs: Sequence[PagedCacheConfig | Mapping | None] = (None,),
    *,
    chunk_size: int = 64,
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> list[tuple[Compared, ...]]:
    """Score the continuation of each span.

    Args:
        spans: (context, continuation) token ids; neither is empty.
        configs: one cache setting or more, over the same spans in the same steps.
        chunk_size, batch_size: as `score` takes them.
        on_tokens: called with the number of tokens of each forward, for progress.
    Returns:
        For each span, for each setting: what `compare` gives of the continuation's tokens.
    Raises:
        ValueError: a context or a continuation is empty.
    """
    for number, (context, continuation) in enumerate(spans):
        if not len(context) or not len(continuation):
            raise ValueError(f"span {number} needs a context and a continuation of one token at least")
    parts: list[list[tuple[Compared, ...]]] = [[] for _ in spans]

    def on_chunk(window: int, start: int, logits: Sequence[torch.Tensor]) -> None:
        context, continuation = spans[window]
        first, end = max(start, len(context) - 1), start + len(logits[0])
        if first < end:
            targets = torch.tensor(list(continuation[first + 1 - len(context) : end + 1 - len(context)]))
            rows = slice(first - start, end - start)
            parts[window].append(tuple(compare(one[rows], targets) for one in logits))
        if on_tokens is not None:
            on_tokens(len(logits[0]))

    fed = [[*context, *continuation[:-1]] for context, continuation in spans]
    settings = [PagedCacheConfig.from_any(config) for config in configs]
    run_windows(model, fed, settings, on_chunk, chunk_size=chunk_size, batch_size=batch_size)
    return [tuple(_joined(pieces) for pieces in zip(*part, strict=True)) for part in parts]


def _joined(pieces: Sequence[Compared]) -> Compared:
    return Compared(
        np.concatenate([piece.logprob for piece in pieces]), np.concatenate([piece.best for piece in pieces])
    )
