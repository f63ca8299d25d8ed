"""What paged attention is measured against: torch's own attention over K and V that lie together.

Contract: each peer is offered in every way that gives the right result, and the bench takes the fastest on the
machine. Sequences of a case are equally long, so that a peer needs no mask for ragged lengths: its best case.
Row ids of the gather and masks are made outside the measured time, as they serve all layers of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa


def decode_ways(group: int) -> dict[str, Callable]:
    """Ways to attend one query q [S, H, D] over k and v [S, KH, L, D] -> [S, H, D]."""

    def enable_gqa(q, k, v):
        return sdpa(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def repeated_heads(q, k, v):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return sdpa(q[:, :, None], k, v)[:, :, 0]

    def group_as_rows(q, k, v):  # the query heads of a group are rows over one K and V
        return sdpa(q.unflatten(1, (-1, group)), k, v).flatten(1, 2)

    if group == 1:
        return {"as it is": group_as_rows}
    return {way.__name__: way for way in (enable_gqa, repeated_heads, group_as_rows)}


def prefill_ways(group: int, num_queries: int, length: int, dtype: torch.dtype) -> dict[str, Callable]:
    """Ways to attend the last queries q [1, H, R, D] over k and v [1, KH, L, D], causally -> [1, H, R, D]."""
    past = length - num_queries
    if past:
        seen = torch.ones(num_queries, length, dtype=torch.bool).tril(past)
        added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        biases = {
            "bool mask": dict(attn_mask=seen),
            "float mask": dict(attn_mask=added),
            "lower-right bias": dict(attn_mask=causal_lower_right(num_queries, length)),
        }
    else:
        biases = {"is_causal": dict(is_causal=True)}
    ways = {}
    for name, bias in biases.items():
        if group > 1:
            ways[f"{name}, enable_gqa"] = lambda q, k, v, bias=bias: sdpa(q, k, v, enable_gqa=True, **bias)
        ways[f"{name}, repeated heads"] = lambda q, k, v, bias=bias: sdpa(q, *repeat(k, v), **bias)

    def repeat(*pair):
        return (x.repeat_interleave(group, dim=1) for x in pair) if group > 1 else pair

    return ways


class Gather:
    """Copies the blocks of all sequences into dense K and V, head by head, in one pass.

    Into new memory, as a cache does that gathers in each layer, or (`kept`) into the same room each time: the least
    that a gather can cost, which needs a step that knows of all its layers.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor):
        _, kv_heads, block_size, head_dim = key_cache.shape
        num_seqs, num_blocks = block_tables.shape
        heads = torch.arange(kv_heads)[:, None]
        self.rows = (block_tables.long()[:, None] * kv_heads + heads).flatten()
        self.run = block_size * head_dim
        self.shape = (num_seqs, kv_heads, num_blocks * block_size, head_dim)
        self.kept = [cache.new_empty(self.shape) for cache in (key_cache, value_cache)]

    def __call__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, kept: bool = False):
        pairs = zip((key_cache, value_cache), self.kept, strict=True)
        return [self._copy(cache, room.view(-1, self.run) if kept else None) for cache, room in pairs]

    def _copy(self, cache: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        return torch.index_select(cache.view(-1, self.run), 0, self.rows, out=room).view(self.shape)
