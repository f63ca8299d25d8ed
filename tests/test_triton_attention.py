"""Paged attention in Triton where its own workings show: parts and their reduction, tiles, padding, runs of tokens.

On a machine without a GPU the kernels run in Triton's interpreter. Problems, poison and bounds are kernel_cases.py's;
besides, every output and every scratch starts as NaN, so that what a kernel fails to write shows.
"""

import itertools
import math
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import build, check

from hf_paged_kernels import triton as backend
from hf_paged_kernels.triton import attend, paged_attention, runtime, variants
from hf_paged_kernels.triton.divide import magic_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAN = float("nan")
OPS = pytest.mark.parametrize("chunks", [None, [1, 3, 0, 17]], ids=["decode", "prefill"])
LENS = [9, 6, 0, 40]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    fresh = torch.Tensor.new_empty

    def new_empty(self, *args, **options):
        tensor = fresh(self, *args, **options)
        return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.fixture
def splits(monkeypatch, small_tiles):
    """Call it to fix the number of parts, however short a sequence is."""

    def fix(number):
        monkeypatch.setattr(paged_attention, "MIN_PART", 1)
        monkeypatch.setattr(paged_attention, "choose_splits", lambda *_: number)

    return fix


FEATURES = {
    "plain": {},
    "window": dict(window=7),
    "window 1": dict(window=1),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "starts": dict(starts=[3, 6, 0, 17]),
    "value size": dict(head_dim=24, head_dim_v=8),
    "all": dict(window=11, softcap=2.0, sinks=True, starts=[1, 0, 5, 30], head_dim=8, head_dim_v=40),
}


@OPS
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, chunks):
    check(build(LENS, chunks, **FEATURES[feature], seed=1, device=DEVICE), "triton")


@OPS
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_precision(dtype, chunks):
    check(build(LENS, chunks, dtype=dtype, head_dim=64, **FEATURES["window"], seed=2, device=DEVICE), "triton")


@pytest.mark.parametrize(
    "head_dim, block_size, chunks",
    [
        (8, 1, [1, 9]),
        (24, 4, None),
        (80, 16, [5, 2]),
        (96, 17, None),
        (256, 64, [1, 8]),
        (8, 256, None),
        (200, 3, [9, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_head_and_block_sizes(head_dim, block_size, chunks, dtype):
    lens = [20, 2 * block_size + 9]
    check(build(lens, chunks, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=3, device=DEVICE), "triton")


@OPS
@pytest.mark.parametrize("dtype, head_dim", [(F32, 9), (BF16, 12), (F16, 255)])
def test_head_sizes_that_are_no_multiple_of_16_bytes(dtype, head_dim, chunks):
    assert variants.attend("sm_90", "bf16", 12, False, 1)["VEC"] == 1
    check(build(LENS, chunks, head_dim=head_dim, dtype=dtype, seed=4, device=DEVICE), "triton")


@pytest.mark.parametrize("group, chunks", [(17, None), (71, None), (37, [2, 1]), (5, [1, 13])])
def test_more_heads_a_group_than_rows_a_tile(group, chunks, small_tiles):
    check(build([7, 19], chunks, kv_heads=1, group=group, seed=5, device=DEVICE), "triton")


# -- tiles and parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("window, start", [(0, 0), (0, 41), (5, 0), (16, 0), (40, 11)])
def test_tiles_at_diagonal_window_and_start(window, start, small_tiles):
    # 16 positions a tile, 5 queries a tile: every way for a border to lie in them.
    options = dict(window=window, starts=[start, 0, start], group=3, kv_heads=1, block_size=4, device=DEVICE)
    check(build([50, 1, 51], [50, 0, 9], **options, seed=6), "triton")
    check(build([50, 1, 51], **options, seed=7), "triton")


@pytest.mark.parametrize("number", [2, 3, 9])
@pytest.mark.parametrize("feature", ["sinks", "all"])
@pytest.mark.parametrize("chunks", [None, [1, 0, 6]], ids=["decode", "prefill"])
def test_parts_join_to_the_same_softmax(number, feature, chunks, splits):
    # 9 parts are more than there are tiles of positions, and more than 16 query rows fall into several tiles.
    splits(number)
    options = FEATURES[feature] | {"window": 50} if feature == "all" else FEATURES[feature]
    options |= {"starts": [1, 0, 30]} if feature == "all" else {}
    check(build([90, 0, 33], chunks, **options, kv_heads=1, seed=8, device=DEVICE), "triton")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_parts_in_half_precision_round_once(dtype, splits):
    case = build([130, 40], dtype=dtype, kv_heads=1, head_dim=32, sinks=True, seed=9, device=DEVICE)
    whole, whole_lse = case.run("triton")
    splits(5)
    check(case, "triton")
    parts, lse = case.run("triton")
    assert (parts.float() - whole.float()).abs().max() <= torch.finfo(dtype).eps * whole.float().abs().max()
    assert (lse - whole_lse).abs().max() <= 1e-5


def test_a_nan_that_is_seen_comes_through_the_reduction(splits):
    splits(3)
    case = build([90, 33], seed=10, device=DEVICE)
    case.value_cache[case.index[0][0, 1]] = NAN  # positions 4 to 7 of sequence 0: one part of three
    case.key_cache[case.index[0][1, 2]] = NAN
    out, lse = case.run("triton")
    assert out.isnan().all() and not lse[0].isnan().any() and lse[1].isnan().all()


def test_the_number_of_parts():
    def choose(programs, visible, sms=132, part_bytes=4):
        return paged_attention.choose_splits(programs, visible, sms, part_bytes)

    assert choose(4096, 4096) == 1  # enough programs: no reduction
    assert choose(8, 128) == 1  # nothing to win
    assert choose(8, 4096) == 32  # few programs: parts of 128
    assert choose(8, 100_000) * 8 in range(3 * 132, 4 * 132 + 1)  # as many as fill the card
    assert choose(4096, 100_000) == 13  # no part over 8192, however full the card
    assert choose(4096, 100_000, part_bytes=2**24) == 4  # but no more than 64 MiB of scratch
    assert choose(4096, 100_000, part_bytes=2**30) == 1
    for programs, visible, sms in itertools.product([0, 1, 7, 1000], [0, 1, 127, 5000], [1, 16, 300]):
        assert 1 <= choose(programs, visible, sms) <= max(1, visible)


def test_loose_and_tight_bounds_give_the_same_numbers():
    case = build([40, 16, 0], [3, 1, 0], sinks=True, seed=11, device=DEVICE)
    whole, _ = case.run("triton", max_seq_len=40, max_query_len=3)
    for bounds in ((None, None), (10**6, 10**6), (40, None)):
        out, _ = case.run("triton", max_seq_len=bounds[0], max_query_len=bounds[1])
        assert (out - whole).abs().max() <= 1e-6


# -- runs of tokens --------------------------------------------------------------------------------


def test_runs_of_every_length_are_found(small_tiles):
    # More sequences than one step of the search looks at, and gaps before, after and between tiles.
    lens = [1 + s % 2 for s in range(135)]
    chunks = [int(s in (0, 1, 60, 126, 127, 128, 134)) for s in range(135)]
    chunks[131] = lens[131] = 37
    check(build(lens, chunks, kv_heads=1, group=1, seed=12, device=DEVICE), "triton")


@pytest.mark.parametrize("group", [1, 3, 16, 71])
@pytest.mark.parametrize("block_m", [16, 64])
def test_each_row_has_one_tile(group, block_m):
    # The formula of attend.first_tile_of on the host: runs get disjoint tiles, enough of them, within the grid.
    bounds = torch.tensor([0, 0, 3, 3, 4, 40, 41, 41, 100, 100, 107]).tolist()
    starts = [begin * group // block_m + run for run, begin in enumerate(bounds[:-1])]
    for run, (begin, end) in enumerate(itertools.pairwise(bounds)):
        needed = -(-(end - begin) * group // block_m)
        following = starts[run + 1] if run + 1 < len(starts) else bounds[-1] * group // block_m + len(starts)
        assert starts[run] + needed <= following
    num_seqs = len(starts) - 2
    assert starts[-1] + needed <= bounds[-1] * group // block_m + num_seqs + 2


def test_no_sequences_and_no_tokens():
    case = build([5, 6], [2, 3], sinks=True, seed=13, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    table, bounds = case.index[0][:0], torch.full((1,), 2, dtype=torch.int32, device=DEVICE)
    case.query.nan_to_num_()
    out, lse = replace(case, index=(table, bounds, none)).run("triton")
    assert not out.any() and torch.allclose(lse, case.options["sinks"].float().expand_as(lse))
    nothing = replace(case, query=case.query[:0], index=(table, bounds * 0, none))
    assert nothing.run("triton")[0].shape == (0, 6, 8)
    empty = replace(case, op="paged_decode", query=case.query[:0], index=(table, none))
    options = {name: value for name, value in case.options.items() if name != "max_query_len"}
    assert replace(empty, options=options).run("triton")[0].shape == (0, 6, 8)


@pytest.mark.parametrize(
    "lens, chunks, starts", [([0, 0], None, None), ([2, 4], None, [2, 9]), ([2, 4], [2, 1], [2, 9])]
)
def test_tables_of_nothing_but_minus_one(lens, chunks, starts):
    case = build(lens, chunks, starts=starts, seed=14, device=DEVICE)
    table = torch.full_like(case.index[0], -1)
    out, lse = replace(case, index=(table, *case.index[1:])).run("triton")
    assert not out.any() and (lse == -math.inf).all()


# -- numbers and addresses -------------------------------------------------------------------------


@triton.jit
def tanh_kernel(out, x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, attend.tanh(tl.load(x + at)))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # in the branch that is not taken
def test_tanh():
    small = torch.logspace(-30, 2.5, 2**14 - 8)
    x = torch.cat([small, -small, torch.tensor([0.0, -0.0, 0.3, -0.3, 1e30, -1e30, math.inf, -math.inf] * 2)])
    out = torch.empty(2**15, device=DEVICE)
    tanh_kernel[(1,)](out, x.to(DEVICE), 2**15)
    wanted = x.double().tanh()
    assert ((out.cpu() - wanted).abs() <= 3e-7 * wanted.abs()).all()
    tanh_kernel[(1,)](out, torch.full((2**15,), NAN, device=DEVICE), 2**15)
    assert out.isnan().all()


def test_division_by_multiplication():
    numbers = {0, 1, 2**31 - 1, 2**31 - 2} | {2**k + d for k in range(2, 31) for d in (-1, 0, 1)}
    for divisor in [*range(1, 300), 1000, 2**20, 2**30 + 1]:
        magic, shift = magic_of(divisor)
        assert 0 < magic < 2**32 and 0 <= shift < 32
        near = {k * divisor + d for k in (1, 7, (2**31 - 2) // divisor) for d in (-1, 0, 1)}
        for n in numbers | {n for n in near if 0 <= n < 2**31}:
            assert (2 * n * magic >> 32) >> shift == n // divisor


@pytest.mark.skipif(DEVICE != "cpu", reason="reads memory of the host")
@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_addresses_beyond_32_bits(op):
    # The caches are the beginning of 5 GiB of addresses, of which only the pages that are written take memory;
    # the interpreter keeps every number in the type that the GPU would. Block 2**26 + 3 starts past element 2**31.
    far, dim = 2**26 + 3, 32
    room = mmap.mmap(-1, (far + 1) * dim * 2 + 4096)
    rows = torch.randn(3, dim, generator=torch.Generator().manual_seed(15)).to(BF16)
    for block, row in ((0, 1), (far, 2)):
        torch.frombuffer(room, dtype=BF16, count=dim, offset=block * dim * 2).copy_(rows[row])
    cache = torch.frombuffer(room, dtype=BF16, count=dim).view(1, 1, 1, dim)  # 1 block, by its shape
    table, lens = torch.tensor([[far, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    index = (table, lens) if op == "paged_decode" else (table, bounds, lens)
    bounds = dict(max_seq_len=2) | ({} if op == "paged_decode" else dict(max_query_len=1))
    out = getattr(backend, op)(rows[:1, None], cache, cache, *index, scale=0.1, **bounds)
    weights = torch.softmax(0.1 * rows[0].double() @ rows[[2, 1]].double().T, -1)
    assert (out[0, 0].double() - weights @ rows[[2, 1]].double()).abs().max() <= 2**-7 * rows.abs().max()


@OPS
@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-20, 30.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_any_scale(scale, softcap, chunks):
    case = build(LENS, chunks, window=8, softcap=softcap, seed=19, device=DEVICE)
    case.options["scale"] = scale
    check(case, "triton")


# -- refusals --------------------------------------------------------------------------------------


def test_what_the_backend_refuses():
    case = build([5, 6], seed=16, device=DEVICE)
    with pytest.raises(
        ValueError, match="key_cache: the Triton backend takes float32, bfloat16, float16, got torch.float64"
    ):
        case.double().run("triton")
    wide = build([3], head_dim=264, seed=17, device=DEVICE)
    with pytest.raises(ValueError, match="head_dim: the Triton backend takes up to 256, got 264"):
        wide.run("triton")
    table, lens = case.index
    with pytest.raises(ValueError, match="seq_lens: expected at most 4 tokens, what block_tables can hold, got 6"):
        replace(case, index=(table[:, :1], lens)).run("triton", max_seq_len=None)
    chunks = build([5, 6], [1, 2], seed=18, device=DEVICE)
    for bad in ([0, 3, 2], [-1, 0, 1], [0, 1, 99]):
        bounds = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
        index = (chunks.index[0], bounds, chunks.index[2])
        with pytest.raises(ValueError, match="query_start_loc: expected a rise within"):
            replace(chunks, index=index).run("triton", max_query_len=None)


def test_a_cpu_without_the_interpreter_is_refused():
    script = """
import torch
from hf_paged_kernels import triton as backend
cache, ints = torch.zeros(1, 1, 4, 8), torch.zeros(1, 2, dtype=torch.int64)
one = torch.ones(1, dtype=torch.int32)
for call in (
    lambda: backend.reshape_and_cache(cache[0, :, :1], cache[0, :, :1], cache, cache, ints[0, :1]),
    lambda: backend.copy_blocks(cache, cache, ints),
    lambda: backend.paged_decode(cache[0, :, :1], cache, cache, one[None], one, scale=1.0, max_seq_len=1),
    lambda: backend.paged_prefill(cache[0, :, :1], cache, cache, one[None], torch.tensor([0, 1]).int(), one, scale=1.0),
):
    try:
        call()
    except RuntimeError as error:
        assert "TRITON_INTERPRET=1" in str(error), error
    else:
        raise AssertionError("ran")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_interpreted_here_unless_there_is_a_gpu():
    assert runtime.interpreted() == (DEVICE == "cpu")
