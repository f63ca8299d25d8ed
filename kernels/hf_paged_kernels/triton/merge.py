"""The reduction of paged attention: the parts of a split sequence become one softmax.

Contract: a program joins the num_splits parts that `attend_kernel` left for one query row and BLOCK_D lanes of
its output, weighting each by its share of the denominator (Flash-Decoding, Dao et al. 2023). A part that saw
nothing has log2 -inf, and its output is not read. Sinks join here, once.
"""

import triton.language as tl

from .attend import finite, log2, or_one
from .runtime import unspecialized


@unspecialized(own="out", fp32="lse partial_out partial_lse sinks")
def merge_kernel(
    out,  # [T, H, Dv], contiguous
    lse,  # [T, H] float32, contiguous
    partial_out,  # [T, H, num_splits, Dv] float32, contiguous
    partial_lse,  # [T, H, num_splits] float32, contiguous
    sinks,  # [H] float32, contiguous; not read if has_sinks == 0
    num_heads,  # H
    num_splits,
    value_dim,  # Dv
    has_sinks,
    BLOCK_S: tl.constexpr,  # parts at a time
    BLOCK_D: tl.constexpr,
):
    LN_2: tl.constexpr = 0.6931471805599453
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sink = tl.load(sinks + row % num_heads, mask=has_sinks != 0, other=float("-inf")) * LOG2_E

    top = sink
    total = tl.exp2(sink - finite(sink))
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        part_row = row * num_splits + split
        part = tl.load(partial_lse + part_row, mask=split < num_splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part, 0))
        shift = finite(new_top)
        weight = tl.exp2(part - shift)
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, 0)
        saw = part != float("-inf")  # true for NaN, which must reach the output
        part_at = partial_out + (part_row * value_dim)[:, None] + d[None, :]
        some = tl.load(part_at, mask=saw[:, None] & (d < value_dim)[None, :], other=0.0)
        acc = acc * fade + tl.sum(some * weight[:, None], 0)
        top = new_top

    tl.store(lse + row, (finite(top) + log2(total)) * LN_2)
    tl.store(out + row * value_dim + d, (acc / or_one(total)).to(out.dtype.element_ty), mask=d < value_dim)
