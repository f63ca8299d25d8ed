"""Writing keys and values into their slots.

Contract: the operator `reshape_and_cache` of the package, for any floating dtype of 2 or 4 bytes: bits are moved
as 16-bit integers, so one compiled kernel serves all. A program moves BLOCK_HEADS heads of one token. Into a cache of
8-bit codes writes `quantize`; where only one of the two caches is one, each kernel has its side.
"""

import torch
import triton
import triton.language as tl

from . import quantize, runtime, variants
from .quantize import rows_of
from .runtime import unspecialized


@unspecialized(i16="key value key_cache value_cache", i64="slot_mapping")
def reshape_and_cache_kernel(
    key,  # [T, KH, Dk], any strides but the last, which is 1
    value,  # [T, KH, Dv], likewise
    key_cache,  # [num_blocks, KH, block_size, Dk], contiguous
    value_cache,  # [num_blocks, KH, block_size, Dv], contiguous
    slot_mapping,  # [T] int64, contiguous; -1 writes nothing
    num_kv_heads,  # KH
    block_size,
    key_units,  # Dk / VEC, with Dk in 16-bit pieces like all that follows
    value_units,  # Dv / VEC
    key_stride_t: tl.int64,  # in units of VEC pieces, like the next three
    key_stride_h: tl.int64,
    value_stride_t: tl.int64,
    value_stride_h: tl.int64,
    VEC: tl.constexpr,  # pieces of 16 bytes where everything is aligned to them, else 1
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head, exists, cache_row = rows_of(slot, num_kv_heads, block_size, BLOCK_HEADS)
    move_rows(key, key_cache, token * key_stride_t, head * key_stride_h, cache_row, exists, key_units, VEC, BLOCK_D)
    move_rows(
        value, value_cache, token * value_stride_t, head * value_stride_h, cache_row, exists, value_units, VEC, BLOCK_D
    )


@triton.jit
def move_rows(source, cache, token_units, head_units, cache_row, exists, units, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one row of units * VEC pieces for each head that exists."""
    dim = units * VEC
    source_row = source + ((token_units + head_units) * VEC)[:, None]
    target_row = cache + (cache_row * dim)[:, None]
    if VEC > 1:
        source_row = tl.multiple_of(source_row, (16, 16))
        target_row = tl.multiple_of(target_row, (16, 16))
    for first in range(0, dim, BLOCK):
        d = first + tl.arange(0, BLOCK)
        inside = exists[:, None] & (d < dim)[None, :]
        tl.store(target_row + d[None, :], tl.load(source_row + d[None, :], mask=inside), mask=inside)


@torch.no_grad()
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the K and V of T tokens into their slots, in place; see the package's function."""
    arch = runtime.architecture_of(key_cache)
    if key.shape[0] == 0:
        return
    slot_mapping = slot_mapping.contiguous()
    sides = ((key, key_cache, k_scale), (value, value_cache, v_scale))
    coded = [side for side in sides if runtime.is_coded(side[1])]
    if coded:
        quantize.write(arch, coded, slot_mapping)
    if len(coded) < 2:
        moved = [side[:2] for side in sides if not runtime.is_coded(side[1])]
        _move(arch, moved[0], moved[1] if len(moved) > 1 else None, slot_mapping)


def _move(arch: str, first: tuple, second: tuple | None, slot_mapping: torch.Tensor) -> None:
    """Write the rows of one (rows, cache) or of two."""
    pairs = [tuple(map(runtime.as_pieces, pair)) for pair in (first, second or first)]
    (key, key_cache), (value, value_cache) = pairs
    num_kv_heads, block_size = key_cache.shape[1:3]
    variant = variants.reshape_and_cache(arch, all(map(runtime.is_aligned, (*pairs[0], *pairs[1]))))
    vec = variant["VEC"]
    runtime.launch(
        variant,
        (key.shape[0], triton.cdiv(num_kv_heads, variant["BLOCK_HEADS"])),
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_kv_heads,
        block_size,
        key.shape[2] // vec,
        value.shape[2] // vec if second else 0,
        key.stride(0) // vec,
        key.stride(1) // vec,
        value.stride(0) // vec,
        value.stride(1) // vec,
    )
