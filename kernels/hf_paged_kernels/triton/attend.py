"""The attention kernel behind paged_decode and paged_prefill.

Contract: a program takes BLOCK_M query rows of one sequence and one KV head (the rows of a query token are the
heads of its group, so that K and V are loaded once for all of them) and walks a part of the positions that they
see, BLOCK_N at a time, through the block table, with an online softmax in base 2 (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention, Dao et al. 2022, 2205.14135). With num_splits > 1 the positions of a tile are
divided among the programs of grid axis 2 (Flash-Decoding, Dao et al. 2023), and `merge` joins the parts.

A cache of 8-bit codes (see `fp8`) is read as such and decoded in registers, exactly, into the query's dtype. A
position's scales do not depend on the lane, so they stay out of the products: that of the key multiplies the score,
that of the value the weight, in float32 both.

What keeps the numbers right:
- Masked slots are loaded as zeros, K and V alike: a weight of 0 would not silence a NaN.
- Their scales are loaded as zeros, too.
- float16 could hold neither every weight times its scale (in e5m2 that of a value of 1 is 2e-5) nor a code times it:
  there a row's largest such weight is 1, and the product is multiplied by what it was.
- Block ids and rows are int64 before they meet a stride: a pool may hold more than 2**31 elements.
- No argument is specialized by value (see `runtime`); alignment is told by VEC, elements that fill 16 bytes (of
  codes: 16): sizes and strides come divided by it, so that the compiler sees the product's divisor and loads 16
  bytes at once.
"""

import triton
import triton.language as tl

from .fp8 import decode
from .runtime import unspecialized

SMALL = tl.constexpr(2.0**-100)  # may divide and be divided


@unspecialized(
    own="out query",
    KEY="key_cache",
    VALUE="value_cache",
    fp32="lse partial_out partial_lse sinks key_scale value_scale",
    i32="block_tables query_start_loc seq_lens seq_starts",
)
def attend_kernel(
    out,  # [T, H, Dv], contiguous; untouched if num_splits > 1
    lse,  # [T, H] float32, contiguous; likewise
    partial_out,  # [T, H, num_splits, Dv] float32, contiguous: each part's attention; untouched if num_splits == 1
    partial_lse,  # [T, H, num_splits] float32, contiguous: log2 of each part's denominator; likewise
    query,  # [T, H, Dk], any strides but the last, which is 1
    key_cache,  # [num_blocks, KH, block_size, Dk], contiguous
    value_cache,  # [num_blocks, KH, block_size, Dv], contiguous
    block_tables,  # [S, max_blocks] int32, any strides
    query_start_loc,  # [S + 1] int32, contiguous; not read if tiles_per_seq > 0
    seq_lens,  # [S] int32, contiguous
    seq_starts,  # [S] int32, contiguous; not read if has_starts == 0
    sinks,  # [H] float32, contiguous; not read if has_sinks == 0
    key_scale,  # float32: of slot s of head h at h * key_scale_stride_h + s * key_scale_stride_s; not read if "own"
    value_scale,  # likewise
    num_tokens,  # T
    num_seqs,  # S
    num_kv_heads,  # KH
    group,  # H / KH
    tiles_per_seq,  # decode, where token s is all that sequence s asks: ceil(group / BLOCK_M); prefill: 0
    num_splits,
    min_split,  # positions below which a part is not made smaller
    key_units,  # Dk / VEC
    value_units,  # Dv / VEC
    block_size,
    block_magic: tl.uint32,  # position // block_size == umulhi(2 * position, block_magic) >> block_shift
    block_shift,
    max_blocks,
    query_stride_t: tl.int64,  # in units of VEC elements
    query_stride_h: tl.int64,  # likewise
    table_stride_s: tl.int64,
    table_stride_b: tl.int64,
    key_scale_stride_h: tl.int64,
    key_scale_stride_s: tl.int64,  # 0: the same for all slots of a head; 1: slots in the cache's order
    value_scale_stride_h: tl.int64,
    value_scale_stride_s: tl.int64,
    key_format,  # number of the format in `fp8`; not read unless KEY is "any"
    value_format,  # likewise
    score_scale: tl.float32,  # scale / softcap with a softcap, else scale * log2(e); over 0
    softcap_log2: tl.float32,  # softcap * log2(e); 0: off
    window,  # at least 1; a large number for none
    has_starts,
    has_sinks,
    zero,  # 0, which the compiler cannot know
    KEY: tl.constexpr,  # "own": keys in the query's dtype; else the format of their codes, see `fp8`
    VALUE: tl.constexpr,  # likewise
    HEAD_PAD: tl.constexpr,  # a power of two, at least Dk and Dv
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The last tiles of a chunk see the most: they go first, so that a long one does not start when others end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # -- which rows: row r of sequence seq is head r % group of token begin + r // group -------------------------
    if tiles_per_seq > 0:
        seq = tile // tiles_per_seq
        begin = seq
        end = seq + 1
        first_row = (tile - seq * tiles_per_seq) * BLOCK_M
    else:
        run, begin, end = find_run(tile, query_start_loc, num_seqs, num_tokens, group, BLOCK_M)
        seq = run - 1
        first_row = (tile - first_tile_of(run, begin, group, BLOCK_M)) * BLOCK_M
    num_rows = (end - begin) * group
    if first_row >= num_rows:
        return
    real = (seq >= 0) & (seq < num_seqs)  # not a run of tokens outside every sequence
    seq_len = tl.load(seq_lens + seq, mask=real, other=0)
    seq_len = tl.minimum(seq_len, max_blocks * block_size)
    start = tl.load(seq_starts + seq, mask=real & (has_starts != 0), other=0)
    start = tl.maximum(start, 0)

    # -- which positions: [low, stop) is what the rows of the tile see together ----------------------------------
    position_of_0 = seq_len - end  # of token 0, had it been of this sequence
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    first_at = position_of_0 + begin + first_row // group
    last_at = position_of_0 + begin + last_row // group
    low = tl.maximum(start, first_at - window + 1)
    stop = last_at + 1
    part_low = low // BLOCK_N * BLOCK_N
    part_len = tl.maximum(tl.cdiv(stop - part_low, num_splits), min_split)
    part_len = tl.cdiv(part_len, BLOCK_N) * BLOCK_N
    part_low += split * part_len
    part_stop = tl.minimum(part_low + part_len, stop)

    row = first_row + tl.arange(0, BLOCK_M)
    row_exists = row < num_rows
    token = begin + row // group
    head = kv_head * group + row % group
    if (num_splits > 1) & (part_low >= part_stop):
        out_row = token.to(tl.int64) * (num_kv_heads * group) + head
        tl.store(partial_lse + out_row * num_splits + split, float("-inf"), mask=row_exists)
        return
    at = position_of_0 + token
    row_low = tl.maximum(start, at - window + 1)
    all_see_from = tl.maximum(start, last_at - window + 1)

    # -- addresses -----------------------------------------------------------------------------------------------
    key_dim = key_units * VEC
    value_dim = value_units * VEC
    d = tl.arange(0, HEAD_PAD)
    query_row = token.to(tl.int64) * (query_stride_t * VEC) + head.to(tl.int64) * (query_stride_h * VEC)
    query_row = query + query_row[:, None]
    kv_row = kv_head.to(tl.int64) * block_size
    keys = key_cache + kv_row * key_dim
    values = value_cache + kv_row * value_dim
    if VEC > 1:
        query_row = tl.multiple_of(query_row, (16, 16))
        keys = tl.multiple_of(keys, 16)
        values = tl.multiple_of(values, 16)
    key_scales = key_scale + kv_head * key_scale_stride_h
    value_scales = value_scale + kv_head * value_scale_stride_h
    table = block_tables + seq.to(tl.int64) * table_stride_s
    slots_per_block = num_kv_heads.to(tl.int64) * block_size
    magic = block_magic.to(tl.uint32)
    unit = tl.where(softcap_log2 > 0, 1.0, score_scale)  # from what `score` below is to base 2

    q = tl.load(query_row + d[None, :], mask=row_exists[:, None] & (d < key_dim)[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    for first in range(part_low, part_stop, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        held = (position >= low) & (position < stop)
        column = (tl.umulhi((2 * position).to(tl.uint32), magic) >> block_shift).to(tl.int32)
        block = tl.load(table + column * table_stride_b, mask=held, other=0)
        slot = block.to(tl.int64) * slots_per_block + (position - column * block_size)
        key_at = keys + (slot * key_dim)[:, None] + d[None, :]
        k = tl.load(key_at, mask=held[:, None] & (d < key_dim)[None, :], other=0)
        if KEY != "own":
            k = decode(k, q.dtype, KEY, key_format)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if KEY != "own":
            score *= tl.load(key_scales + slot * key_scale_stride_s, mask=held, other=0.0)[None, :]
        if softcap_log2 > 0:
            score = softcap_log2 * tanh(score * score_scale)
        if (first < all_see_from) | (first + BLOCK_N > first_at + 1):
            sees = (position[None, :] >= row_low[:, None]) & (position[None, :] <= at[:, None])
            score = tl.where(sees, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * unit)
        shift = finite(new_top)
        weight = tl.exp2(score * unit - shift[:, None])  # one instruction: a multiplication and a difference
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, 1)
        value_at = values + (slot * value_dim)[:, None] + d[None, :]
        v = tl.load(value_at, mask=held[:, None] & (d < value_dim)[None, :], other=0)
        acc *= fade[:, None]
        if VALUE != "own":
            v = decode(v, q.dtype, VALUE, value_format)
            weight *= tl.load(value_scales + slot * value_scale_stride_s, mask=held, other=0.0)[None, :]
        if VALUE != "own" and q.dtype == tl.float16:
            largest = tl.maximum(tl.max(tl.abs(weight), 1), SMALL)[:, None]
            acc += largest * tl.dot((weight * (1.0 / largest)).to(v.dtype), v)
        else:
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top

    # The rows again. But for `zero` the compiler would see that it has them already, and keep them in the layout of
    # the stores, some hundred registers, through the loop.
    row = first_row + zero + tl.arange(0, BLOCK_M)
    row_exists = row < num_rows
    token = begin + row // group
    head = kv_head * group + row % group
    out_row = token.to(tl.int64) * (num_kv_heads * group) + head
    in_out = row_exists[:, None] & (d < value_dim)[None, :]
    if num_splits > 1:
        shift = finite(top)
        part_row = out_row * num_splits + split
        part_at = partial_out + (part_row * value_dim)[:, None]
        if VEC > 1:
            part_at = tl.multiple_of(part_at, (16, 16))
        tl.store(partial_lse + part_row, shift + log2(total), mask=row_exists)
        tl.store(part_at + d[None, :], acc / or_one(total)[:, None], mask=in_out)
    else:
        LN_2: tl.constexpr = 0.6931471805599453
        LOG2_E: tl.constexpr = 1.4426950408889634
        sink = tl.load(sinks + head, mask=row < num_rows * has_sinks, other=float("-inf")) * LOG2_E
        shift = finite(tl.maximum(top, sink))
        fade = tl.exp2(top - shift)
        total = total * fade + tl.exp2(sink - shift)
        out_at = out + (out_row * value_dim)[:, None]
        if VEC > 1:
            out_at = tl.multiple_of(out_at, (16, 16))
        tl.store(lse + out_row, (shift + log2(total)) * LN_2, mask=row_exists)
        result = acc * (fade / or_one(total))[:, None]
        tl.store(out_at + d[None, :], result.to(out.dtype.element_ty), mask=in_out)


# -- runs of tokens: sequence s is run s + 1; the tokens before and after all sequences are runs 0 and S + 1 -------


@triton.jit
def first_tile_of(run, begin, group, BLOCK_M: tl.constexpr):
    """The tile at which a run starts. It leaves each run as many tiles as it can need: with b and e the first row
    of a run and of the next, e // M + 1 - b // M >= ceil((e - b) / M). So T * group // M + S + 2 tiles suffice."""
    return begin * group // BLOCK_M + run


@triton.jit
def find_run(tile, query_start_loc, num_seqs, num_tokens, group, BLOCK_M: tl.constexpr):
    """Of a tile: its run, the run's first token and the one after its last. No length is needed on the host."""
    CHUNK: tl.constexpr = 128
    count = 0  # of runs that start at or before this tile
    for first in range(0, num_seqs + 2, CHUNK):
        run = first + tl.arange(0, CHUNK)
        exists = run < num_seqs + 2
        begin = tl.load(query_start_loc + (run - 1), mask=exists & (run > 0), other=0)
        begin = tl.minimum(begin, num_tokens)
        count += tl.sum((exists & (first_tile_of(run, begin, group, BLOCK_M) <= tile)).to(tl.int32), 0)
    run = count - 1
    begin = tl.load(query_start_loc + (run - 1), mask=run > 0, other=0)
    end = tl.load(query_start_loc + run, mask=run <= num_seqs, other=num_tokens)
    return run, tl.minimum(begin, num_tokens), tl.minimum(end, num_tokens)


# -- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def finite(top):
    """The largest score, or 0 where there is none: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def or_one(total):
    """A denominator; 1 where nothing was seen, for an output of 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def log2(total):
    """Of a denominator; -inf where nothing was seen."""
    return tl.where(total == 0.0, float("-inf"), tl.log2(or_one(total)))


@triton.jit
def tanh(x):
    """Within 3e-7 of tanh(x), relative to it. Up to 0.3 its Taylor series, since 1 - exp(-2a) would cancel; beyond,
    (1 - exp(-2a)) / (1 + exp(-2a)) of a = |x|, which cannot overflow."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    y = x * x
    series = a + a * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925)))))
    result = tl.where(a < 0.3, series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -result, result)
