"""Decode for sequences that begin with the same blocks: attention over those is computed once for all of them.

Contract: the same result as `paged_decode` up to rounding, from two calls of it. The queries of all sequences that
share become query heads of one sequence, which reads the shared blocks once and multiplies larger matrices; then
every sequence attends to what lies behind them. The two partial results are merged by their log-sum-exps
(FlashAttention-2, Dao 2023; the split into prefix and suffix is that of Hydragen, Juravsky et al. 2024).
"""

import torch


def merge_states(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor):
    """Attention over two sets of positions from that over each: `(out, lse)`.

    out, other_out  [..., H, Dv], softmax-weighted sums of V over either set
    lse, other_lse  [..., H] float32, log of each softmax's denominator; -inf where a set is empty
    """
    merged = torch.logaddexp(lse, other_lse)
    weight = torch.exp(lse - merged).nan_to_num_(0.0)  # both empty: -inf - -inf
    other = torch.exp(other_lse - merged).nan_to_num_(0.0)
    out = out.float() * weight[..., None] + other_out.float() * other[..., None]
    return out.to(other_out.dtype), merged


def decode_shared(decode, query, key_cache, value_cache, block_tables, seq_lens, rows, num_blocks, starts, **options):
    """`paged_decode` where sequences begin with the same full blocks.

    decode      the operator that does it
    rows        [R] int64, the sequences that share; None for all of them
    num_blocks  how many of the blocks at the beginning of their tables are the same
    starts      [S] int32, the tokens in those blocks for each sequence that shares, 0 for the others
    options     of `paged_decode`, without sliding_window, seq_starts and return_lse; every `seq_lens[rows]` is larger
                than the tokens in the shared blocks
    Returns [S, H, Dv].
    """
    num_heads, block_size = query.shape[1], key_cache.shape[2]
    num_kv_heads = key_cache.shape[1]
    sinks = options.pop("sinks", None)  # a term of the whole softmax: counted with the rest
    rest, rest_lse = decode(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        sinks=sinks,
        seq_starts=starts,
        return_lse=True,
        **options,
    )
    options["max_seq_len"] = num_shared = num_blocks * block_size
    sharing = query if rows is None else query[rows]
    table = block_tables[:1] if rows is None else block_tables.index_select(0, rows[:1])
    # [R, KH, group, D] -> the heads that share K and V side by side, of one sequence.
    folded = sharing.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
    lens = torch.full_like(seq_lens[:1], num_shared)
    out, lse = decode(
        folded.reshape(1, -1, query.shape[2]),
        key_cache,
        value_cache,
        table[:, :num_blocks],
        lens,
        return_lse=True,
        **options,
    )
    out = out.view(num_kv_heads, len(sharing), -1, out.shape[2]).transpose(0, 1).reshape(-1, num_heads, out.shape[2])
    lse = lse.view(num_kv_heads, len(sharing), -1).transpose(0, 1).reshape(-1, num_heads)
    if rows is None:
        return merge_states(out, lse, rest, rest_lse)[0]
    merged, _ = merge_states(out, lse, rest[rows], rest_lse[rows])
    return rest.index_copy_(0, rows, merged)
