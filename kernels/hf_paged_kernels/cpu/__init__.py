"""The operators in C with OpenMP, for CPUs: float32, bfloat16 and float16, accumulated in float32, and caches of codes.

Contract: a backend (see the package's `__init__`) whose arguments are already checked; here they become pointers,
sizes and strides. The library is plain C (paged.c says how it works) and knows neither torch nor Python; it is
optional, and `load` says why it is missing. It uses the OpenMP runtime that torch has loaded, and as many
threads as `torch.get_num_threads()`; a result does not depend on how many.

Table entries, lengths and slots that would lead outside the pool raise ValueError.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5}
_TYPES = DTYPES | CODES

# The structs of paged.h and paged.c: every field has 8 bytes.
_ATTENTION = struct.Struct("=31q2dq")
_WRITING = struct.Struct("=26q")
_FAULT = ctypes.c_int64 * 4


# -- the library -----------------------------------------------------------------------------------


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None, and in words what was found."""
    files = sorted(Path(__file__).parent.glob("_paged*.so")) + sorted(Path(__file__).parent.glob("_paged*.pyd"))
    if not files:
        return None, "the C extension was not built (no C compiler at installation?)"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:  # built for another platform, or no OpenMP runtime in this process
        return None, f"the C extension does not load ({error})"
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.hf_paged_attention.argtypes = [ctypes.c_char_p, pointer]
    library.hf_paged_scratch_bytes.argtypes = [ctypes.c_char_p]
    library.hf_paged_scratch_bytes.restype = int64
    library.hf_paged_reshape_and_cache.argtypes = [ctypes.c_char_p, pointer]
    library.hf_paged_sum_weights.argtypes = [pointer]
    library.hf_paged_sum_weights.restype = None
    library.hf_paged_content_sums.argtypes = [int64] + [pointer] * 3 + [ctypes.c_int, pointer]
    library.hf_paged_content_sums.restype = None
    library.hf_paged_copy_blocks.argtypes = [int64] + [pointer] * 3 + [int64] * 3 + [pointer]
    for function in (library.hf_paged_use, library.hf_paged_isa):
        function.restype = ctypes.c_char_p
    library.hf_paged_use.argtypes = [ctypes.c_char_p]
    library.hf_paged_isa.argtypes = [ctypes.c_int]
    return library, f"C with {library.hf_paged_use(None).decode()}"


def instruction_sets() -> list[str]:
    """Those that this processor can run, best first; the first is used."""
    library, _ = load()
    names = []
    while library and (name := library.hf_paged_isa(len(names))):
        names.append(name.decode())
    return names


def use_instruction_set(name: str | None = None) -> str:
    """Choose one of `instruction_sets()` for every later call of the process, None the best; for tests."""
    library, why = load()
    if library is None:
        raise RuntimeError(why)
    used = library.hf_paged_use(None if name is None else name.encode())
    if used is None:
        raise ValueError(f"instruction set: expected one of {instruction_sets()}, got {name!r}")
    return used.decode()


@cache
def _sum_weights():
    weights = (ctypes.c_uint32 * 4096)()  # SUM_WORDS of paged.h
    load()[0].hf_paged_sum_weights(weights)
    return weights


def content_sums(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Exact sums of what contiguous tensors on the CPU contain, 0 to 2**64 - 1 each; None without the library.

    A change of any one aligned 32-bit word changes a sum, and others but for a chance of 2**-32 (sums.c). It takes as
    long as reading the memory does.
    """
    library, _ = load()
    if library is None:
        return None
    for tensor in tensors:
        if not tensor.is_cpu or not tensor.is_contiguous():
            where = f"{tensor.device}, strides {tensor.stride()}"
            raise ValueError(f"tensors: expected contiguous ones on the CPU, got one on {where}")
    count = len(tensors)
    pointers = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
    sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for tensor in tensors])
    sums = (ctypes.c_uint64 * count)()
    library.hf_paged_content_sums(count, pointers, sizes, _sum_weights(), torch.get_num_threads(), sums)
    return list(sums)


# -- operators -------------------------------------------------------------------------------------


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    slot_mapping = slot_mapping.contiguous()
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    key, value = _writable(key, key_cache), _writable(value, value_cache)
    packed = _WRITING.pack(
        slot_mapping.data_ptr(), slot_mapping.shape[0], num_kv_heads, num_blocks, block_size, torch.get_num_threads(),
        *_rows_fields(key, key_cache, k_scale), *_rows_fields(value, value_cache, v_scale),
    )  # fmt: skip
    fault = _FAULT()
    if load()[0].hf_paged_reshape_and_cache(packed, fault):
        raise ValueError(_message(fault, num_blocks, block_size, 0, "slot_mapping"))


def _writable(rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Rows as the C code takes them: elements side by side, and of a type that it makes codes of."""
    if cache.dtype in CODES and rows.dtype not in DTYPES:
        rows = rows.float()  # what a codec of float32 starts with anyway
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _rows_fields(rows, cache, scale) -> tuple:
    """struct rows_writing of paged.h."""
    size, row = rows.itemsize, cache.shape[3]
    kind = 0 if scale is None else {3: 0, 1: 1, 2: 2}[scale.dim()]
    types = DTYPES.get(rows.dtype, 0), _TYPES.get(cache.dtype, 0)  # where no codes are made, they do not matter
    strides = rows.stride(0) * size, rows.stride(1) * size
    return rows.data_ptr(), cache.data_ptr(), _address(scale), kind, *types, row, row * cache.itemsize, *strides


def copy_blocks(key_cache, value_cache, pairs, k_scale=None, v_scale=None) -> None:
    pairs = pairs.contiguous()
    num_blocks, fault = key_cache.shape[0], _FAULT()
    arrays = [key_cache, value_cache]
    arrays += [scale for scale in (k_scale, v_scale) if scale is not None and scale.dim() == 3]
    pointers = (ctypes.c_void_p * len(arrays))(*[array.data_ptr() for array in arrays])
    sizes = (ctypes.c_int64 * len(arrays))(*[array[:1].nbytes if num_blocks else 0 for array in arrays])
    counts = pairs.shape[0], num_blocks, torch.get_num_threads()
    if load()[0].hf_paged_copy_blocks(len(arrays), pointers, sizes, pairs.data_ptr(), *counts, fault):
        raise ValueError(_message(fault, num_blocks, key_cache.shape[2], 0, "pairs"))


def paged_decode(query, key_cache, value_cache, block_tables, seq_lens, **options):
    return _attention(query, key_cache, value_cache, block_tables, None, seq_lens, **options)


def plain_decode(
    query, key_cache, value_cache, block_tables, seq_lens, scale, sliding_window, softcap, max_seq_len,
    k_scale=None, v_scale=None,
):  # fmt: skip
    """`paged_decode` of plain tensors that fit each other, unchecked ones, or None where any is unlike that.

    It reads each property once: they cost a tenth of a microsecond each, which adds up to more than the kernel.
    """
    dtype = query.dtype
    code = DTYPES.get(dtype)
    if not (
        code is not None
        and query.is_cpu
        and type(query) is type(key_cache) is type(value_cache) is type(block_tables) is type(seq_lens) is torch.Tensor
        and key_cache.is_cpu
        and value_cache.is_cpu
        and block_tables.is_cpu
        and seq_lens.is_cpu
        and torch.int32 is block_tables.dtype is seq_lens.dtype
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and seq_lens.is_contiguous()
        and (max_seq_len is None or type(max_seq_len) is int and max_seq_len >= 0)
        and type(scale) is float
        and type(sliding_window) is int
        and sliding_window >= 0
        and type(softcap) in (float, int)
        and softcap >= 0
    ):
        return None
    query_shape, key_shape, tables_shape = query.shape, key_cache.shape, block_tables.shape
    if len(query_shape) != 3 or len(key_shape) != 4 or len(tables_shape) != 2:
        return None
    (num_seqs, num_heads, head_dim), (max_seqs, max_blocks) = query_shape, tables_shape
    num_blocks, num_kv_heads, block_size, _ = key_shape
    fits = max_seqs == num_seqs and seq_lens.shape == (num_seqs,) and value_cache.shape == key_shape
    if not fits or key_shape[3] != head_dim or not num_kv_heads * block_size * head_dim * num_heads:
        return None
    if num_heads % num_kv_heads or (library := load()[0]) is None:
        return None
    token_stride, head_stride, stride = query.stride()
    if stride != 1:
        return None
    if dtype is key_cache.dtype is value_cache.dtype and k_scale is v_scale is None:
        caches = 0, 0, code, code, code, 0, 0
    elif (caches := _plain_caches(dtype, code, key_cache, value_cache, k_scale, v_scale)) is None:
        return None
    out = query.new_empty(query_shape)
    packed = _ATTENTION.pack(
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(),
        0, 0, 0, out.data_ptr(), 0, *caches, num_seqs, num_seqs, num_heads, num_kv_heads, head_dim, head_dim,
        num_blocks, block_size, max_blocks, token_stride, head_stride, *block_tables.stride(),
        min(sliding_window, 2**31), scale, softcap, torch.get_num_threads(),
    )  # fmt: skip
    fault = _FAULT()
    if library.hf_paged_attention(packed, fault):
        raise ValueError(_message(fault, num_blocks, block_size, max_blocks, (num_seqs, None)))
    return out


def _plain_caches(dtype, code, key_cache, value_cache, k_scale, v_scale) -> tuple | None:
    """`_cache_fields` of caches some of which hold codes, or None where they and their scales do not fit each other."""
    slots = key_cache.shape[:3]
    for stored, scale in ((key_cache.dtype, k_scale), (value_cache.dtype, v_scale)):
        if stored not in CODES:
            if stored is not dtype or scale is not None:
                return None
        elif not (
            type(scale) is torch.Tensor
            and scale.dtype is torch.float32
            and scale.is_cpu
            and scale.is_contiguous()
            and (scale.shape == slots or scale.shape == slots[1:2])
        ):
            return None
    return _cache_fields(code, key_cache, value_cache, k_scale, v_scale)


def _cache_fields(code, key_cache, value_cache, k_scale, v_scale) -> tuple:
    """The fields of `struct attention` from k_scale to v_scale_per_slot; code: of the queries' dtype."""
    types = code, _TYPES[key_cache.dtype], _TYPES[value_cache.dtype]
    per_slot = (int(scale is not None and scale.dim() == 3) for scale in (k_scale, v_scale))
    return _address(k_scale), _address(v_scale), *types, *per_slot


def paged_prefill(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, **options):
    return _attention(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, **options)


def _attention(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale, sliding_window=0,
               softcap=0.0, sinks=None, seq_starts=None, return_lse=False, max_seq_len=None, max_query_len=None,
               k_scale=None, v_scale=None):  # fmt: skip
    """Both operators; max_seq_len and max_query_len are of no use where the lengths lie on the host."""
    if query.dtype not in DTYPES:
        raise ValueError(f"key_cache: expected a dtype of {tuple(DTYPES)} on the backend 'c', got {query.dtype}")
    query, seq_lens = _rows_adjacent(query), seq_lens.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    token_stride, head_stride, _ = query.stride()
    num_blocks, num_kv_heads, block_size, head_dim_v = value_cache.shape
    out = query.new_empty(num_tokens, num_heads, head_dim_v)
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32) if return_lse else None
    sinks = None if sinks is None else sinks.float().contiguous()
    query_start_loc = None if query_start_loc is None else query_start_loc.contiguous()
    seq_starts = None if seq_starts is None else seq_starts.contiguous()
    packed = _ATTENTION.pack(
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(),
        _address(query_start_loc), _address(seq_starts), _address(sinks), out.data_ptr(), _address(lse),
        *_cache_fields(DTYPES[query.dtype], key_cache, value_cache, k_scale, v_scale),
        num_tokens, seq_lens.shape[0], num_heads, num_kv_heads, head_dim, head_dim_v,
        num_blocks, block_size, block_tables.shape[1],
        token_stride, head_stride, *block_tables.stride(), min(sliding_window, 2**31),
        scale, softcap, torch.get_num_threads(),
    )  # fmt: skip
    fault = _FAULT()
    if load()[0].hf_paged_attention(packed, fault):
        bounds = None if query_start_loc is None else query_start_loc.tolist()
        raise ValueError(_message(fault, num_blocks, block_size, block_tables.shape[1], (num_tokens, bounds)))
    return (out, lse) if return_lse else out


def _rows_adjacent(rows: torch.Tensor) -> torch.Tensor:
    """The same rows with the elements of each side by side, which the C code relies on."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _message(fault, num_blocks: int, block_size: int, max_blocks: int, subject) -> str:
    kind, index, entry, value = fault  # struct fault of paged.c
    if kind == 1:
        return f"query_start_loc: expected a rise within 0..{subject[0]}, got {subject[1]}"
    if kind == 2:
        capacity = max_blocks * block_size
        return f"seq_lens: expected at most {capacity} tokens, what block_tables can hold, got {value}"
    if kind == 3:
        where = f"entry {entry} of sequence {index}, which attends there"
        return f"block_tables: expected a block in 0..{num_blocks - 1}, got {value} in {where}"
    if kind == 4:
        raise MemoryError(f"no {value} bytes for a temporary of paged attention")
    if subject == "pairs":
        return f"pairs: expected blocks in 0..{num_blocks - 1}, got {value} in row {index}"
    return f"slot_mapping: expected at most {num_blocks * block_size - 1}, got {value} in row {index}"
