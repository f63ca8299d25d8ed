"""Operators over a paged KV cache, behind one name each whatever runs them.

Contract: checks arguments, chooses a backend per call, counts the call. Imports torch, the standard
library and the backends; never hf_paged, never transformers.

Layout, of one layer: key_cache [num_blocks, KH, block_size, Dk] and value_cache [num_blocks, KH, block_size,
Dv], contiguous, float32, float64, bfloat16 or float16, or 8-bit codes (see `quantize`) with scales. H query heads
share KH key/value heads in groups of H / KH neighbours (grouped-query attention, Ainslie et al. 2023). block_tables
[S, MB] int32: entry b of row s is the id of the block that holds positions b * block_size and on of sequence s; -1, or
any block of the pool, where nothing attends. Lengths, starts and windows count tokens. Every tensor lies on the caches'
device. No operator records autograd.

Scales, float32 and contiguous: k_scale of a key_cache that holds codes, v_scale of such a value_cache, None of any
other. [num_blocks, KH, block_size]: one for each token and head, written by reshape_and_cache and moved by copy_blocks.
[KH]: one for each head, fixed beforehand. [KH, Dk], of keys alone: one for each channel, likewise. The queries' dtype
is that of a cache without codes; where both hold codes it may be any of the floating ones.

The operators are also `torch.ops.hf_paged.*` (see `ops`, which has no checks), so that torch.compile sees through.
`dispatch` has the backends and the choice among them; `reference` says what each operator means.
"""

import torch

from .checks import check_attention, check_copying, check_scales, check_tensor, check_writing
from .cpu import content_sums
from .cpu.decode_rows import DecodeRows
from .cpu.hadamard import hadamard_product
from .cpu.objects import ObjectSnapshot
from .dispatch import BACKENDS, OPS, backend, choose, describe
from .ops import call, op_calls, plain_decode, reset_op_calls
from .quantize import QMAX, SMALLEST_SCALE, dequantize, dynamic_scale, is_quantized, quantize
from .reference import slot_ids
from .shared_prefix import decode_shared, merge_states

__all__ = [
    "BACKENDS",
    "DecodeRows",
    "OPS",
    "ObjectSnapshot",
    "QMAX",
    "SMALLEST_SCALE",
    "backend",
    "choose",
    "content_sums",
    "copy_blocks",
    "dequantize",
    "describe",
    "dynamic_scale",
    "hadamard_product",
    "is_quantized",
    "merge_states",
    "op_calls",
    "paged_decode",
    "paged_decode_shared",
    "paged_prefill",
    "quantize",
    "reset_op_calls",
    "reshape_and_cache",
    "slot_ids",
]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of T tokens into their slots, in place, quantised where the cache holds codes.

    key           [T, KH, Dk], the cache's dtype (any floating one where that holds codes), any strides
    value         [T, KH, Dv], likewise
    slot_mapping  [T] int64: block_id * block_size + offset, each slot at most once; -1 writes nothing
    """
    check_writing(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    scales = () if k_scale is None is v_scale else (k_scale, v_scale)
    call("reshape_and_cache", (key, value, key_cache, value_cache, slot_mapping, *scales))


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
):
    """Attention of the last token of each sequence over its blocks (PagedAttention, Kwon et al. 2023).

    query           [S, H, Dk], the caches' dtype; the token at position seq_len - 1, already written
    block_tables    [S, MB] int32
    seq_lens        [S] int32: tokens of each sequence, 0 for a row to leave out
    scale           factor on query . key, usually Dk ** -0.5
    sliding_window  the token sees this many tokens, itself included; 0: all
    softcap         c > 0: scores become c * tanh(score / c) after the scale (Gemma 2 report, 2024); 0: off
    sinks           [H] floating: a learned logit per head that joins the softmax's denominator only, neither
                    scaled nor capped (gpt-oss, 2025; the idea from StreamingLLM, Xiao et al. 2023)
    seq_starts      [S] int32: positions before it are not seen (left padding, chunked attention)
    return_lse      also return the log of each softmax's denominator, for merging (Dao et al. 2022)
    max_seq_len     an upper bound of seq_lens known on the host; spares the wait for the device

    Returns [S, H, Dv] in the query's dtype; with return_lse also lse [S, H] float32. A row that sees nothing
    gives zeros and lse -inf (the sink, where there is one). NaN in a slot that is not seen changes nothing.
    """
    if k_scale is not None or v_scale is not None:
        query, k_scale = _fold_channels(query, key_cache, k_scale)
    if sinks is None is seq_starts and not return_lse:
        out = plain_decode(
            query, key_cache, value_cache, block_tables, seq_lens, scale, sliding_window, softcap, max_seq_len,
            **_given(k_scale, v_scale),
        )  # fmt: skip
        if out is not None:
            return out
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": sinks,
        "seq_starts": seq_starts,
        "return_lse": return_lse,
        "max_seq_len": max_seq_len,
    } | _given(k_scale, v_scale)
    tensors = (query, key_cache, value_cache, block_tables, seq_lens)
    check_attention(*tensors, **options)
    return call("paged_decode", tensors, options)


def paged_decode_shared(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None,
    num_blocks: int,
    starts: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_decode` of sequences some of which begin with the same full blocks: those are read once for all of them.

    rows        [R] int64: sequences that share; None: all
    num_blocks  how many blocks at the beginning of their tables are the same
    starts      [S] int32: tokens in those blocks for a sequence that shares, fewer than it has; 0 for the others

    The other arguments are as in `paged_decode`; there is no window. Returns [S, H, Dv], which differs from it by
    rounding alone: in 16 bits each of two partial results is rounded before they are merged.
    """
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "max_seq_len": max_seq_len}
    options |= {"k_scale": k_scale, "v_scale": v_scale}
    tensors = (query, key_cache, value_cache, block_tables, seq_lens)
    return decode_shared(paged_decode, *tensors, rows, num_blocks, starts, **options)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    max_query_len: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
):
    """Causal attention of the last tokens of each sequence over its blocks, their own chunk included.

    query            [T, H, Dk], the caches' dtype: the chunks of all sequences, one after the other
    query_start_loc  [S + 1] int32: rows query_start_loc[s]:query_start_loc[s + 1] (maybe none) belong to
                     sequence s, the last of them at position seq_lens[s] - 1
    seq_lens         [S] int32: tokens of each sequence, past and chunk together, all already written
    max_query_len    an upper bound of the chunks' lengths known on the host, like max_seq_len

    The other arguments, and what is returned ([T, H, Dv], lse [T, H]), are as in `paged_decode`, with the
    window counted back from each query. Rows of no sequence count as rows that see nothing. Sequences are
    kept apart even when one holds NaN; within a sequence a NaN may reach the other queries of its chunk.
    """
    options = dict(scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    options.update(seq_starts=seq_starts, return_lse=return_lse, max_seq_len=max_seq_len)
    if k_scale is not None or v_scale is not None:
        query, k_scale = _fold_channels(query, key_cache, k_scale)
    options.update(_given(k_scale, v_scale), max_query_len=max_query_len)
    tensors = (query, key_cache, value_cache, block_tables)
    check_attention(*tensors, seq_lens, query_start_loc=query_start_loc, **options)
    return call("paged_prefill", (*tensors, query_start_loc, seq_lens), options)


def copy_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pairs: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy whole blocks, and the scales of their tokens, in place: block pairs[i, 1] := block pairs[i, 0] as it was
    before the call.

    pairs  [N, 2] int64 block ids, no destination twice; chains and swaps are fine, every source is read first
    """
    check_copying(key_cache, value_cache, pairs, k_scale, v_scale)
    scales = () if k_scale is None is v_scale else (k_scale, v_scale)
    call("copy_blocks", (key_cache, value_cache, pairs, *scales))


def _given(k_scale, v_scale) -> dict:
    """The scales as options of an operator, none where there are none."""
    return {} if k_scale is None is v_scale else {"k_scale": k_scale, "v_scale": v_scale}


def _fold_channels(query: torch.Tensor, key_cache: torch.Tensor, k_scale: torch.Tensor | None):
    """The query times each key channel's scale, and scales of 1: q . (s * k) = (q * s) . k. Other scales stay."""
    if k_scale is None or k_scale.dim() != 2:
        return query, k_scale
    ones = k_scale.new_ones(key_cache.shape[1])
    check_scales(key_cache, key_cache, k_scale, ones)
    check_tensor(query, "query", (None, None, key_cache.shape[3]), None, key_cache)
    if query.shape[1] % len(ones):
        raise ValueError(f"query: expected a multiple of {len(ones)} heads (KV heads), got {query.shape[1]}")
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    factors = k_scale.to(wide).repeat_interleave(query.shape[1] // len(ones), 0)
    return (query.to(wide) * factors).to(query.dtype), ones
