"""Argument checks of every operator, in one place.

Contract: each raises ValueError with the argument's name, what was expected and what came. They compare
shapes, dtypes, devices and plain numbers only, so none waits for a device; values inside tensors are trusted.
"""

import torch

from .quantize import QMAX

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ANY = object()  # a dtype that the caller looks at itself


def check_writing(key, value, key_cache, value_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    """Of reshape_and_cache."""
    check_caches(key_cache, value_cache)
    check_scales(key_cache, value_cache, k_scale, v_scale)
    check_tensor(slot_mapping, "slot_mapping", (None,), torch.int64, key_cache)
    num_tokens = slot_mapping.shape[0]
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        shape = (num_tokens, cache.shape[1], cache.shape[3])
        check_tensor(rows, name, shape, None if cache.dtype in QMAX else cache.dtype, key_cache)
        if rows.dtype not in DTYPES:
            raise ValueError(f"{name}: expected a dtype of {DTYPES}, got {rows.dtype}")


def check_copying(key_cache, value_cache, pairs, k_scale=None, v_scale=None) -> None:
    """Of copy_blocks."""
    check_caches(key_cache, value_cache)
    check_scales(key_cache, value_cache, k_scale, v_scale)
    check_tensor(pairs, "pairs", (None, 2), torch.int64, key_cache)


def check_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    *,
    query_start_loc=None,
    scale,
    sliding_window,
    softcap,
    sinks,
    seq_starts,
    return_lse,
    max_seq_len,
    max_query_len=None,
    k_scale=None,
    v_scale=None,
) -> None:
    """Of paged_prefill, and of paged_decode, which has no query_start_loc: one query for each sequence."""
    plain = query_start_loc is None and sinks is None is seq_starts and k_scale is None is v_scale
    if not (plain and _decode_fits(query, key_cache, value_cache, block_tables, seq_lens)):
        _name_the_misfit(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, sinks, seq_starts)
        check_scales(key_cache, value_cache, k_scale, v_scale)
    if not isinstance(scale, (int, float)):
        raise ValueError(f"scale: expected a number, got {scale!r}")
    if not isinstance(softcap, (int, float)) or not softcap >= 0:
        raise ValueError(f"softcap: expected a number >= 0 (0: off), got {softcap!r}")
    if not isinstance(sliding_window, int) or sliding_window < 0:
        raise ValueError(f"sliding_window: expected an int >= 0 (0: off), got {sliding_window!r}")
    for name, bound in (("max_seq_len", max_seq_len), ("max_query_len", max_query_len)):
        if bound is not None and (not isinstance(bound, int) or bound < 0):
            raise ValueError(f"{name}: expected None or an int >= 0, got {bound!r}")


def _decode_fits(query, key_cache, value_cache, block_tables, seq_lens) -> bool:
    """Whether all is as it should be, in few steps: plain decode runs in every layer of every step, and takes no
    longer than these checks when the batch is small. False sends the call to the checks that say what is wrong."""
    try:
        (num_blocks, num_kv_heads, block_size, head_dim), dtype = key_cache.shape, key_cache.dtype
        (num_queries, num_heads, query_dim), (num_seqs, _) = query.shape, block_tables.shape
        return bool(
            value_cache.shape[:3] == (num_blocks, num_kv_heads, block_size)
            and num_queries == num_seqs
            and query_dim == head_dim
            and seq_lens.shape == (num_seqs,)
            and block_size * head_dim * value_cache.shape[3]
            and num_heads > 0 == num_heads % num_kv_heads
            and dtype in DTYPES
            and dtype is query.dtype is value_cache.dtype
            and torch.int32 is block_tables.dtype is seq_lens.dtype
            and key_cache.device == value_cache.device == query.device == block_tables.device == seq_lens.device
            and key_cache.is_contiguous()
            and value_cache.is_contiguous()
        )
    except (AttributeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return False


def _name_the_misfit(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, sinks, seq_starts):
    """ValueError for the first tensor that does not fit the others."""
    check_caches(key_cache, value_cache)
    check_tensor(block_tables, "block_tables", (None, None), torch.int32, key_cache)
    num_seqs = block_tables.shape[0]
    num_queries = num_seqs
    if query_start_loc is not None:
        check_tensor(query_start_loc, "query_start_loc", (num_seqs + 1,), torch.int32, key_cache)
        num_queries = None
    own = [cache.dtype for cache in (key_cache, value_cache) if cache.dtype not in QMAX]
    check_tensor(query, "query", (num_queries, None, key_cache.shape[3]), own[0] if own else None, key_cache)
    if query.dtype not in DTYPES:
        raise ValueError(f"query: expected a dtype of {DTYPES}, got {query.dtype}")
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query: expected a multiple of {num_kv_heads} heads (KV heads), got {num_heads}")
    check_tensor(seq_lens, "seq_lens", (num_seqs,), torch.int32, key_cache)
    if seq_starts is not None:
        check_tensor(seq_starts, "seq_starts", (num_seqs,), torch.int32, key_cache)
    if sinks is not None:
        check_tensor(sinks, "sinks", (num_heads,), None, key_cache)


def check_caches(key_cache, value_cache) -> None:
    """key_cache [num_blocks, KH, block_size, Dk] and value_cache [num_blocks, KH, block_size, Dv]."""
    check_tensor(key_cache, "key_cache", (None, None, None, None), ANY, key_cache)
    check_tensor(value_cache, "value_cache", (*key_cache.shape[:3], None), ANY, key_cache)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in DTYPES and cache.dtype not in QMAX:
            raise ValueError(f"{name}: expected a dtype of {(*DTYPES, *QMAX)}, got {cache.dtype}")
        if 0 in cache.shape[1:]:
            raise ValueError(f"{name}: expected no empty dimension after the first, got {list(cache.shape)}")
        if not cache.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {cache.stride()}")
    if key_cache.dtype in DTYPES and value_cache.dtype in DTYPES and key_cache.dtype is not value_cache.dtype:
        raise ValueError(f"value_cache: expected dtype {key_cache.dtype}, got {value_cache.dtype}")


def check_scales(key_cache, value_cache, k_scale, v_scale) -> None:
    """float32 [num_blocks, KH, block_size], [KH] or, of keys, [KH, Dk] for a cache of codes; None for any other."""
    for name, cache, scale in (("k_scale", key_cache, k_scale), ("v_scale", value_cache, v_scale)):
        if (cache.dtype in QMAX) is not (scale is not None):
            wanted = "a float32 tensor for a cache of" if scale is None else "None for a cache of"
            raise ValueError(f"{name}: expected {wanted} {cache.dtype}, got {_short(scale)}")
        if scale is None:
            continue
        num_blocks, num_kv_heads, block_size, head_dim = cache.shape
        shapes = [(num_blocks, num_kv_heads, block_size), (num_kv_heads,)]
        if name == "k_scale":
            shapes.append((num_kv_heads, head_dim))
        if not isinstance(scale, torch.Tensor) or tuple(scale.shape) not in shapes:
            raise ValueError(f"{name}: expected a shape of {shapes}, got {_short(scale)}")
        check_tensor(scale, name, tuple(scale.shape), torch.float32, key_cache)
        if not scale.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {scale.stride()}")


def _short(scale) -> str:
    return f"{list(scale.shape)}" if isinstance(scale, torch.Tensor) else repr(scale)


def check_tensor(tensor, name: str, shape: tuple, dtype, like: torch.Tensor) -> None:
    """One tensor against a shape (None: any size), a dtype (None: any floating one; ANY) and like's device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {tensor!r}")
    got = tensor.shape
    fits = len(got) == len(shape)
    for want, size in zip(shape, got, strict=False):  # a loop: this runs dozens of times a step
        fits = fits and (want is None or want == size)
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(got)}")
    if dtype is not ANY and (tensor.dtype is not dtype if dtype is not None else not tensor.is_floating_point()):
        raise ValueError(f"{name}: expected dtype {dtype or 'floating'}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected the key_cache's device {like.device}, got {tensor.device}")
