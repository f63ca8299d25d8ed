"""paged_decode and paged_prefill on the host: which kernel, how many programs, how many parts.

Contract: the operators of the package, for float32, bfloat16 and float16, caches of those or of 8-bit codes, and head
sizes up to 256. With max_seq_len
(and max_query_len, for prefill) nothing waits for the device, so a CUDA graph can hold the calls; the bounds decide
how the work is divided, never what is computed. Both operators share `attend_kernel`; see there.
"""

import torch
import triton

from . import attend, fp8, merge, runtime, variants  # noqa: F401  (attend and merge declare kernels)
from .divide import magic_of

LOG2_E = 1.4426950408889634
NO_WINDOW = 2**30
TINY = 1e-30  # stands for a scale of 0, which would make NaN of a masked score

# How a sequence is split among programs: as many parts as give each multiprocessor some programs, but none of a
# part too short to repay the reduction; and however many programs there are, no part longer than MAX_PART, or
# one long sequence in a full batch would keep one multiprocessor busy when all others are done. Chosen from the
# registers and the shared memory that a program takes; not yet measured on a card.
PROGRAMS_PER_SM = 4
MIN_PART = 128  # positions
MAX_PART = 8192
SCRATCH_BYTES = 64 * 2**20  # what the parts' outputs may take


def choose_splits(num_programs: int, max_visible: int, num_sms: int, part_bytes: int) -> int:
    """Parts of each sequence: an upper bound, the kernel makes fewer of a shorter one.

    num_programs: without any split. max_visible: positions that one tile of queries sees, at most. part_bytes: of
    the outputs of one part of every query row.
    """
    to_fill = PROGRAMS_PER_SM * num_sms // max(1, num_programs)
    wanted = max(to_fill, triton.cdiv(max_visible, MAX_PART))
    return max(1, min(wanted, max_visible // MIN_PART, SCRATCH_BYTES // part_bytes))


@torch.no_grad()
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
    """Attention of one new token per sequence; see the package's function."""
    if max_seq_len is None:
        max_seq_len = _longest(seq_lens, block_tables, key_cache)
    out, lse = _attend(
        query,
        key_cache,
        value_cache,
        block_tables,
        None,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        seq_starts=seq_starts,
        max_seq_len=max_seq_len,
        max_query_len=1,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out, lse) if return_lse else out


@torch.no_grad()
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
    """Causal attention of packed chunks; see the package's function."""
    if max_seq_len is None or max_query_len is None:
        # Something has to come to the host: then all of it, checked.
        max_seq_len = _longest(seq_lens, block_tables, key_cache)
        max_query_len = _longest_chunk(query_start_loc, query.shape[0])
    out, lse = _attend(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        seq_starts=seq_starts,
        max_seq_len=max_seq_len,
        max_query_len=max_query_len,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out, lse) if return_lse else out


def _attend(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    scale,
    sliding_window,
    softcap,
    sinks,
    seq_starts,
    max_seq_len,
    max_query_len,
    k_scale,
    v_scale,
):
    """out [T, H, Dv] and lse [T, H]; without query_start_loc, token s is the only one of sequence s."""
    arch = runtime.architecture_of(key_cache)
    own = [cache for cache in (key_cache, value_cache) if not runtime.is_coded(cache)]
    runtime.check_dtype(own[0] if own else query, "key_cache" if own else "query")
    num_tokens, num_heads, key_dim = query.shape
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    num_seqs, max_blocks = block_tables.shape
    group = num_heads // num_kv_heads
    dtype, coded = runtime.TYPES[query.dtype], len(own) < 2
    formats = [fp8.FORMATS.get(cache.dtype, "own") for cache in (key_cache, value_cache)]

    out = query.new_empty(num_tokens, num_heads, value_dim)
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if num_tokens == 0:
        return out, lse

    unit = variants.vec_of(dtype, coded)
    aligned = runtime.is_aligned(key_cache, unit) and runtime.is_aligned(value_cache, unit)
    if scale < 0:  # the kernel takes the largest score before it scales
        query, scale = -query, -scale
    scale = max(float(scale), TINY)
    query = runtime.rows_together(query)
    if aligned and not runtime.is_aligned(query, unit):
        query = query.clone(memory_format=torch.contiguous_format)
    variant = variants.attend(arch, dtype, max(key_dim, value_dim), aligned, max_query_len * group, *formats)
    block_m, vec = variant["BLOCK_M"], variant["VEC"]

    if query_start_loc is None:
        tiles_per_seq = triton.cdiv(group, block_m)
        num_tiles = num_seqs * tiles_per_seq
        query_start_loc = seq_lens  # not read
    else:
        tiles_per_seq = 0
        num_tiles = num_tokens * group // block_m + num_seqs + 2

    sliding_window = min(sliding_window or NO_WINDOW, NO_WINDOW)
    max_visible = min(max_seq_len, max_blocks * block_size, sliding_window + max_query_len)
    num_programs, part_bytes = num_tiles * num_kv_heads, out.numel() * 4
    num_splits = choose_splits(num_programs, max_visible, runtime.num_sms(query.device), part_bytes)
    partial_out = partial_lse = lse  # not written
    if num_splits > 1:
        partial_lse = lse.new_empty(num_tokens, num_heads, num_splits)
        partial_out = lse.new_empty(num_tokens, num_heads, num_splits, value_dim)

    has_sinks, has_starts = sinks is not None, seq_starts is not None
    sinks = sinks.to(torch.float32).contiguous() if has_sinks else lse
    seq_lens = seq_lens.contiguous()
    magic, shift = magic_of(block_size)
    key_codes, key_format = runtime.codes_of(key_cache)
    value_codes, value_format = runtime.codes_of(value_cache)
    k_scale, *k_scale_strides = _scales(k_scale, lse)
    v_scale, *v_scale_strides = _scales(v_scale, lse)
    runtime.launch(
        variant,
        (num_tiles, num_kv_heads, num_splits),
        out,
        lse,
        partial_out,
        partial_lse,
        query,
        key_codes,
        value_codes,
        block_tables,
        query_start_loc.contiguous(),
        seq_lens,
        seq_starts.contiguous() if has_starts else seq_lens,
        sinks,
        k_scale,
        v_scale,
        num_tokens,
        num_seqs,
        num_kv_heads,
        group,
        tiles_per_seq,
        num_splits,
        MIN_PART,
        key_dim // vec,
        value_dim // vec,
        block_size,
        magic,
        shift,
        max_blocks,
        query.stride(0) // vec,
        query.stride(1) // vec,
        block_tables.stride(0),
        block_tables.stride(1),
        *k_scale_strides,
        *v_scale_strides,
        key_format,
        value_format,
        scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E,
        sliding_window,
        int(has_starts),
        int(has_sinks),
        0,
    )
    if num_splits > 1:
        variant = variants.merge(arch, dtype)
        grid = (num_tokens * num_heads, triton.cdiv(value_dim, variant["BLOCK_D"]))
        sizes = (num_heads, num_splits, value_dim, int(has_sinks))
        runtime.launch(variant, grid, out, lse, partial_out, partial_lse, sinks, *sizes)
    return out, lse


def _scales(scale: torch.Tensor | None, unused: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(scales, stride from head to head, stride from slot to slot) of an 8-bit cache's scales; of none, what will not
    be read. Dynamic scales lie in the order of the slots."""
    if scale is None:
        return unused, 0, 0
    return (scale, scale.shape[2], 1) if scale.dim() == 3 else (scale, scale.stride(0), 0)


# -- host copies, where no bound is given ------------------------------------------------------------


def _longest(seq_lens, block_tables, key_cache) -> int:
    longest = int(seq_lens.max()) if seq_lens.shape[0] else 0
    capacity = block_tables.shape[1] * key_cache.shape[2]
    if longest > capacity:
        raise ValueError(f"seq_lens: expected at most {capacity} tokens, what block_tables can hold, got {longest}")
    return longest


def _longest_chunk(query_start_loc, num_tokens: int) -> int:
    bounds = query_start_loc.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > num_tokens:
        raise ValueError(f"query_start_loc: expected a rise within 0..{num_tokens}, got {bounds}")
    return max((end - begin for begin, end in zip(bounds, bounds[1:], strict=False)), default=0)
