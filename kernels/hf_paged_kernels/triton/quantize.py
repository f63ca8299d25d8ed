"""Writing keys and values into slots that hold 8-bit codes.

Contract: `reshape_and_cache` of the package where a cache is one of codes. A program encodes BLOCK_HEADS heads of one
token, of K or of V. A dynamic scale comes from the whole row, is stored beside its slot, and divides the row; a static
one is read. Rows are float32, bfloat16 or float16; float64 is rounded to float32 before anything else looks at it.
"""

import torch
import triton
import triton.language as tl

from ..quantize import SMALLEST_SCALE as SMALLEST
from . import runtime, variants
from .fp8 import encode, largest_of
from .runtime import unspecialized

SMALLEST_SCALE = tl.constexpr(SMALLEST)


@unspecialized(
    own="rows_0 rows_1",
    u8="cache_0 cache_1",
    fp32="scale_0 scale_1",
    i64="slot_mapping",
)
def quantize_kernel(
    rows_0,  # [T, KH, D], any strides but the last, which is 1
    rows_1,  # likewise; not read, like all of side 1, where grid axis 2 is 1
    cache_0,  # [num_blocks, KH, block_size, D], contiguous
    cache_1,
    scale_0,  # dynamic: [num_blocks, KH, block_size], contiguous; else [KH] or [KH, D]
    scale_1,
    slot_mapping,  # [T] int64, contiguous; -1 writes nothing
    num_kv_heads,  # KH
    block_size,
    units_0,  # D / VEC
    units_1,
    stride_t_0: tl.int64,  # in units of VEC elements, like the next three
    stride_h_0: tl.int64,
    stride_t_1: tl.int64,
    stride_h_1: tl.int64,
    format_0,  # number of the format in `fp8`
    format_1,
    dynamic_0,  # 1: the scale is written; 0: it is read
    dynamic_1,
    scale_stride_h_0: tl.int64,  # of a static scale
    scale_stride_h_1: tl.int64,
    scale_stride_d_0: tl.int64,  # 0: the same for all lanes
    scale_stride_d_1: tl.int64,
    VEC: tl.constexpr,  # 16 where all rows start and end at multiples of 16 elements, else 1
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head, exists, cache_row = rows_of(slot, num_kv_heads, block_size, BLOCK_HEADS)
    if tl.program_id(2) == 0:
        row = token * stride_t_0 + head * stride_h_0
        scale_row = head * scale_stride_h_0
        encode_rows(rows_0, cache_0, scale_0, row, cache_row, scale_row, scale_stride_d_0, exists, units_0, format_0,
                    dynamic_0, VEC, BLOCK_HEADS, BLOCK_D)  # fmt: skip
    else:
        row = token * stride_t_1 + head * stride_h_1
        scale_row = head * scale_stride_h_1
        encode_rows(rows_1, cache_1, scale_1, row, cache_row, scale_row, scale_stride_d_1, exists, units_1, format_1,
                    dynamic_1, VEC, BLOCK_HEADS, BLOCK_D)  # fmt: skip


@triton.jit
def rows_of(slot, num_kv_heads, block_size, HEADS: tl.constexpr):
    """The heads of this program, which of them exist, and the row of each in a cache."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    block = slot // block_size
    return head, head < num_kv_heads, (block * num_kv_heads + head) * block_size + (slot - block * block_size)


@triton.jit
def encode_rows(
    rows,
    cache,
    scale,
    row,
    cache_row,
    scale_row,
    scale_stride_d,
    exists,
    units,
    number,
    dynamic,
    VEC: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode one row of units * VEC elements for each head that exists. Nothing read here was written here."""
    dim = units * VEC
    source_row = rows + (row * VEC)[:, None]
    target_row = cache + (cache_row * dim)[:, None]
    if VEC > 1:
        source_row = tl.multiple_of(source_row, (16, 16))
        target_row = tl.multiple_of(target_row, (16, 16))
    largest = tl.zeros([HEADS], tl.float32)
    for first in range(0, dim * dynamic, BLOCK):
        d = first + tl.arange(0, BLOCK)
        x = tl.load(source_row + d[None, :], mask=exists[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of the numbers; an infinity is 0x7F800000
        magnitude = tl.where(magnitude < 0x7F800000, magnitude, 0).to(tl.float32, bitcast=True)
        largest = tl.maximum(largest, tl.max(magnitude, 1))
    own_scale = tl.maximum(tl.div_rn(largest, largest_of(number)), SMALLEST_SCALE)
    if dynamic != 0:
        tl.store(scale + cache_row, own_scale, mask=exists)
    for first in range(0, dim, BLOCK):
        d = first + tl.arange(0, BLOCK)
        inside = exists[:, None] & (d < dim)[None, :]
        x = tl.load(source_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scale_at = scale + scale_row[:, None] + (d * scale_stride_d)[None, :]
        given = tl.load(scale_at, mask=exists[:, None] & (d < dim * (1 - dynamic))[None, :], other=1.0)
        divisor = tl.where(dynamic != 0, own_scale[:, None], given)
        tl.store(target_row + d[None, :], encode(x, divisor, number), mask=inside)


def write(arch: str, sides: list, slot_mapping: torch.Tensor) -> None:
    """Encode rows into their slots.

    sides: one or two of (rows [T, KH, D], cache, scale), K's and V's
    """
    sides = [(_rows(rows), cache, scale) for rows, cache, scale in sides]
    if len({rows.dtype for rows, *_ in sides}) > 1:
        for side in sides:  # a kernel reads one type
            write(arch, [side], slot_mapping)
        return
    sides = [(rows, *runtime.codes_of(cache), scale) for rows, cache, scale in sides]
    (rows, cache, _, _), num_sides = sides[0], len(sides)
    vec = variants.VEC_BYTES
    aligned = all(runtime.is_aligned(tensor, vec) for side in sides for tensor in side[:2])
    variant = variants.quantize(arch, runtime.TYPES[rows.dtype], aligned)
    vec, num_kv_heads = variant["VEC"], cache.shape[1]
    grid = (rows.shape[0], triton.cdiv(num_kv_heads, variant["BLOCK_HEADS"]), num_sides)
    rows, caches, formats, scales = zip(*(sides * 2)[:2], strict=True)
    dynamic = [int(scale.dim() == 3) for scale in scales]
    runtime.launch(
        variant,
        grid,
        *rows,
        *caches,
        *scales,
        slot_mapping,
        num_kv_heads,
        cache.shape[2],
        *(x.shape[2] // vec for x in rows),
        *(stride // vec for x in rows for stride in x.stride()[:2]),
        *formats,
        *dynamic,
        *(scale.stride(0) for scale in scales),
        *(scale.stride(1) if scale.dim() == 2 else 0 for scale in scales),
    )


def _rows(rows: torch.Tensor) -> torch.Tensor:
    return runtime.rows_together(rows.float() if rows.dtype == torch.float64 else rows)
