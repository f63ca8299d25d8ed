"""Caches of 8-bit codes in C: the same codes and scales as the codec in torch, and its attention, on every
instruction set. The oracle of attention is the reference in float64 over the values that the codes stand for."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from allpairspy import AllPairs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import build, expected, limits, within

import hf_paged_kernels as kernels
from hf_paged_kernels import cpu

pytestmark = pytest.mark.skipif("c" not in kernels.BACKENDS, reason="the C extension was not built here")

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FORMATS = (E4M3, E5M2, INT8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


# -- attention -------------------------------------------------------------------------------------


def encoded(cache, form, per_slot):
    """A cache of `kernel_cases.build` as codes, its scales, and the float32 values that they stand for.

    Poisoned rows, all NaN or inf, become NaN codes, where the format has them, and get NaN scales.
    """
    if form is None:
        return cache, None, cache.float()
    rows = cache.float()
    scale = kernels.dynamic_scale(rows, form)  # [num_blocks, KH, block_size]
    if not per_slot:
        scale = scale.amax((0, 2))
    wide = scale[..., None] if per_slot else scale[:, None, None]
    codes = kernels.quantize(rows, wide, form)
    values = kernels.dequantize(codes, wide)
    if per_slot:
        scale = torch.where(rows.isfinite().all(-1), scale, NAN)
    return codes, scale, values


def quantized(case, key_form, value_form, per_slot):
    """(case with coded caches, scales, the oracle's case)."""
    key_cache, k_scale, key = encoded(case.key_cache, key_form, per_slot[0])
    value_cache, v_scale, value = encoded(case.value_cache, value_form, per_slot[1])
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    ours = replace(case, key_cache=key_cache, value_cache=value_cache, options=case.options | scales)
    return ours, replace(case, key_cache=key, value_cache=value)


def check(case, key_form, value_form, per_slot=(True, True)):
    ours, plain = quantized(case, key_form, value_form, per_slot)
    ref, ref_lse = expected(plain)
    out, lse = ours.run("c", return_lse=True)
    assert out.dtype == case.query.dtype and out.shape == ref.shape
    within(out, ref, limits(case, "c", ref), "out")
    within(lse, ref_lse, 1e-5 * ref_lse.abs().clamp(min=1), "lse")
    return out, lse


FEATURES = ["none", "window", "softcap", "sinks", "starts", "window+softcap+sinks+starts"]
AXES = {
    "call": ["decode", "long", "prompt", "chunk"],
    "head_dim": [12, 64, 80, 128, 256],
    "block_size": [1, 16, 32],
    "group": [1, 3, 4, 16],
    "dtype": DTYPES,
    "formats": [pair for pair in itertools.product([None, *FORMATS], repeat=2) if pair != (None, None)],
    "features": FEATURES,
}


def problem(call, head_dim, block_size, group, dtype, features):
    lens, chunks = {
        "decode": ([37, 0, 2, 64], None),
        "long": ([1100, 3], None),
        "prompt": ([70, 0, 9], [70, 0, 9]),
        "chunk": ([65, 0, 40, 33], [20, 0, 1, 0]),
    }[call]
    features = set(features.split("+"))
    return build(
        lens,
        chunks,
        head_dim=head_dim,
        head_dim_v=64 if head_dim == 80 else None,
        block_size=block_size,
        group=group,
        dtype=dtype,
        window=21 if "window" in features else 0,
        softcap=1.5 if "softcap" in features else 0.0,
        sinks="sinks" in features,
        starts=[n // 3 for n in lens] if "starts" in features else None,
        seed=head_dim + block_size + group,
    )


@pytest.mark.parametrize("cell", [tuple(row) for row in AllPairs(list(AXES.values()))], ids=str)
def test_attention_over_codes_is_the_reference_over_their_values(cell):
    *shape, dtype, formats, features = cell
    per_slot = [(n >> 1 & 1, n & 1) for n in range(4)][(shape[1] + shape[2] + shape[3]) % 4]
    check(problem(*shape, dtype, features), *formats, per_slot)


def every_problem(dtype):
    """Calls that reach both kernels and split rows, with each pair of formats that can meet."""
    forms = [(E4M3, E4M3), (E5M2, INT8), (INT8, E5M2), (None, E4M3), (INT8, None)]
    for (key_form, value_form), per_slot in zip(forms, [(1, 1), (1, 0), (0, 1), (1, 1), (0, 0)], strict=True):
        yield problem("long", 80, 16, 3, dtype, "sinks"), key_form, value_form, per_slot
        yield problem("chunk", 64, 16, 4, dtype, "window"), key_form, value_form, per_slot


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cpu.instruction_sets())
def test_every_instruction_set_and_number_of_threads(instruction_set, threads, name, dtype):
    instruction_set(name)
    for arguments in every_problem(dtype):
        threads(1)
        one = check(*arguments)
        threads(2)
        assert all(map(torch.equal, one, check(*arguments)))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_not_seen_changes_nothing(form):
    """Codes and scales of unseen slots: every one of NaN, infinity and a large number leads to the same bits."""
    case = build([33, 5], [12, 5], head_dim=24, window=9, starts=[2, 1], sinks=True)
    ours, _ = quantized(case, form, form, (True, True))
    ours.options["return_lse"] = True
    unseen = ours.options["k_scale"].isnan()
    assert unseen.any() and not unseen.all()
    results = []
    for code, scale in ((0x7F, NAN), (0x80, INF), (0x7C, 1e38), (0, 0.0)):
        for cache in (ours.key_cache, ours.value_cache):
            cache.view(torch.uint8)[unseen] = code
        for name in ("k_scale", "v_scale"):
            ours.options[name][unseen] = scale
        results.append(ours.run("c"))
    assert not any(out.isnan().any() for out, _ in results)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_code_for_nan_that_is_seen_shows(instruction_set, form):
    """In K all of the heads that see it, in V one column: as with plain caches."""
    for name, head_dim in itertools.product(cpu.instruction_sets(), (8, 80)):
        instruction_set(name)
        case = build([70, 70], head_dim=head_dim, kv_heads=2, group=3)
        ours, _ = quantized(case, form, form, (False, True))
        block = int(case.index[0][0, 1])
        good = ours.run("c")[0]
        assert good.isfinite().all()
        nan = -128 if form is INT8 else 0x7F
        ours.value_cache.view(torch.int8)[block, 1, 2, head_dim - 1] = nan
        out = ours.run("c")[0].isnan()
        assert out[0, 3:, -1].all() and out.sum() == 3
        ours.key_cache.view(torch.int8)[block, 0, 3, 5] = nan if form is INT8 else -1
        out = ours.run("c")[0].isnan()
        assert out[0, :3].all() and out.sum() == 3 * head_dim + 3
        torch.testing.assert_close(ours.run("c")[0][1], good[1], rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("name", cpu.instruction_sets())
def test_every_code_is_read_as_torch_reads_it(instruction_set, name, form):
    """One position has weight 1, so attention hands out what it read: as decode does it and as prefill does."""
    instruction_set(name)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form).view(4, 1, 1, 64)
    numbers = codes.float().isfinite() & (codes.view(torch.uint8) != 0x80 if form is INT8 else True)
    scale = torch.tensor([1.0, 0.37, 2.0**-100, 3e30]).view(4, 1, 1)
    want = kernels.dequantize(codes, scale[..., None])
    key, table, lens = torch.zeros(4, 1, 64), torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4).int()
    for cache in (codes, torch.where(numbers, codes.view(torch.uint8), 0).view(form)):
        arguments = (key, key[:, None], cache, table)
        with kernels.backend("c"):
            few = kernels.paged_decode(*arguments, lens, scale=1.0, v_scale=scale)
            tile = kernels.paged_prefill(
                torch.zeros(4, 16, 64), *arguments[1:], torch.arange(5).int(), lens, scale=1.0, v_scale=scale
            )
        wanted = torch.where(numbers | (cache is codes), want, 0.0)[:, 0]
        torch.testing.assert_close(few, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(tile, wanted.expand_as(tile), rtol=0, atol=0, equal_nan=True)


# -- writes ----------------------------------------------------------------------------------------


def written(rows, form, scale=None):
    """Rows [T, KH, D] written by C into slots of their own: (codes [T, KH, D] as bytes, scales [T, KH] where C makes
    them). They are written as values, or as keys where the scales are those of channels."""
    num_tokens, num_heads, head_dim = rows.shape
    codes = torch.full((num_tokens, num_heads, 1, head_dim), 0x55, dtype=torch.uint8).view(form)
    caches = (codes.clone(), codes)
    scales = [torch.full((num_tokens, num_heads, 1), -1.0), scale]
    if scale is None:
        scales[1] = scales[0].clone()
    elif scale.dim() == 2:
        caches, scales = caches[::-1], scales[::-1]
    with kernels.backend("c"):
        kernels.reshape_and_cache(rows, rows, *caches, torch.arange(num_tokens), *scales)
    return codes.view(torch.uint8)[:, :, 0], None if scale is not None else scales[1][:, :, 0]


def wanted_codes(rows, scale, form):
    return kernels.quantize(rows, scale, form).view(torch.uint8)


def hard_numbers(form):
    """Where rounding, clamping and the change to denormals happen, each with its neighbours in float32."""
    grid = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form).float()
    grid = grid[grid.isfinite()].unique()
    middles = (grid[1:].double() + grid[:-1].double()).div(2).float()
    some = torch.cat([grid, middles, torch.tensor([0.0, 1e-45, 1e-38, 2.0**-126, 3.4e38, 1e6, 500.0, 127.5])])
    bits = torch.cat([some, -some]).view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    return torch.cat([near, torch.tensor([0.0, -0.0, NAN, -NAN, INF, -INF])])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_codes_where_rounding_turns(instruction_set, form):
    numbers = hard_numbers(form)
    rows = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 50)]).view(-1, 1, 50)
    for name in cpu.instruction_sets():
        instruction_set(name)
        for scale in (1.0, 0.75, 3.0, 2.0**-126, 1e30):
            fixed = torch.tensor([scale])
            codes, _ = written(rows, form, fixed)
            assert torch.equal(codes, wanted_codes(rows, fixed, form)), (name, scale)
        codes, scales = written(rows, form)
        assert torch.equal(scales, kernels.dynamic_scale(rows, form)), name
        assert torch.equal(codes, wanted_codes(rows, scales[..., None], form)), name


BITS = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFFC00000, 0, 0x80000000, 1]), min_size=1)


@settings(deadline=None, max_examples=150)
@given(BITS, st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0x00800000, 0x7F7FFFFF))
@example([0x7F7FFFFF], E4M3, torch.float32, 0x00800000)
def test_codes_of_any_bits(bits, form, dtype, scale_bits):
    """Any float32, float16 and bfloat16, under scales of their own, of a head and of channels."""
    words = torch.tensor(bits, dtype=torch.int64)
    words = torch.where(words < 2**31, words, words - 2**32).int()
    rows = words.view(torch.float32) if dtype is torch.float32 else words.view(dtype)
    rows = rows.view(1, 1, -1)
    codes, scales = written(rows, form)
    assert torch.equal(scales, kernels.dynamic_scale(rows, form))
    assert torch.equal(codes, wanted_codes(rows, scales[..., None], form))
    fixed = torch.tensor([scale_bits], dtype=torch.int32).view(torch.float32)
    assert torch.equal(written(rows, form, fixed)[0], wanted_codes(rows, fixed, form))
    channels = kernels.dynamic_scale(rows[0, 0, :, None], torch.int8)[None].contiguous()
    assert torch.equal(written(rows, form, channels)[0], wanted_codes(rows, channels, form))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [1, 12, 64, 80, 300])
def test_rows_of_every_size_and_dtype(instruction_set, threads, dtype, head_dim):
    """Random rows in each scheme, with strides, by two threads; float64 becomes float32 first."""
    torch.manual_seed(head_dim)
    rows = (torch.randn(40, head_dim, 3, dtype=torch.float64) * torch.randn(40, 1, 3).exp()).to(dtype).transpose(1, 2)
    rows[3, 1, 0], rows[4, :, :] = INF, NAN
    channels = torch.rand(3, head_dim) + 0.1
    for name, form in itertools.product(cpu.instruction_sets(), FORMATS):
        instruction_set(name)
        results = []
        for count in (1, 2):
            threads(count)
            results.append(written(rows, form))
            assert torch.equal(written(rows, form, channels)[0], wanted_codes(rows, channels, form))
            heads = channels[:, 0].contiguous()
            assert torch.equal(written(rows, form, heads)[0], wanted_codes(rows, heads[:, None], form))
        assert all(map(torch.equal, *results))
        codes, scales = results[0]
        assert torch.equal(scales, kernels.dynamic_scale(rows, form))
        assert torch.equal(codes, wanted_codes(rows, scales[..., None], form))


@pytest.mark.parametrize("forms", [(E4M3, None), (None, INT8), (E5M2, E4M3), (INT8, INT8)], ids=str)
def test_writes_and_copies_touch_their_slots_alone(forms):
    """Whole caches against the reference: blocks, offsets, slots of -1, and an own cache beside codes."""
    torch.manual_seed(0)
    rows = [torch.randn(5, 2, size, dtype=torch.bfloat16) for size in (24, 16)]
    slots = torch.tensor([7, -1, 0, 23, 10])
    pairs = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 4]])
    found = []
    for backend in ("c", "reference"):
        caches, scales = [], []
        for form, size in zip(forms, (24, 16), strict=True):
            caches.append(torch.zeros(6, 2, 4, size, dtype=form or torch.bfloat16))
            scales.append(torch.full((6, 2, 4), -1.0) if form else None)
        with kernels.backend(backend):
            kernels.reshape_and_cache(*rows, *caches, slots, *scales)
            kernels.copy_blocks(*caches, pairs, *scales)
        found.append([x.view(torch.uint8) for x in (*caches, *scales) if x is not None])
    assert all(map(torch.equal, *found))


def test_fixed_scales_are_neither_written_nor_copied():
    cache = torch.zeros(3, 2, 4, 8, dtype=E4M3)
    fixed, channels = torch.tensor([0.5, 2.0]), torch.rand(2, 8) + 0.5
    before = fixed.clone(), channels.clone()
    rows = torch.randn(2, 2, 8)
    with kernels.backend("c"):
        kernels.reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor([1, 6]), channels, fixed)
        kernels.copy_blocks(cache, cache.clone(), torch.tensor([[0, 2]]), channels, fixed)
    assert torch.equal(cache[2].view(torch.uint8), cache[0].view(torch.uint8)) and cache[0].float().any()
    assert torch.equal(fixed, before[0]) and torch.equal(channels, before[1])


# -- the way past the checks -----------------------------------------------------------------------


def test_plain_decode_takes_codes_that_fit_and_leaves_the_rest_to_the_checks():
    case = build([30, 0, 9], head_dim=24, block_size=16, lse=False)
    ours, plain = quantized(case, E4M3, INT8, (True, False))
    tensors = [ours.query.contiguous(), ours.key_cache, ours.value_cache, *(t.contiguous() for t in ours.index)]
    k_scale, v_scale = ours.options["k_scale"], ours.options["v_scale"]
    with kernels.backend("reference"):
        want = kernels.paged_decode(plain.query, plain.key_cache, plain.value_cache, *plain.index, scale=0.3)
    arguments = (*tensors, 0.3, 0, 0.0, None)
    got = cpu.plain_decode(*arguments, k_scale=k_scale, v_scale=v_scale)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.paged_decode(*tensors, scale=0.3, k_scale=k_scale, v_scale=v_scale), got)
    for wrong in (
        dict(k_scale=None, v_scale=v_scale),
        dict(k_scale=k_scale, v_scale=None),
        dict(k_scale=k_scale.double(), v_scale=v_scale),
        dict(k_scale=k_scale[:-1], v_scale=v_scale),
        dict(k_scale=k_scale.transpose(0, 1).contiguous().transpose(0, 1), v_scale=v_scale),
        dict(k_scale=k_scale, v_scale=v_scale[:1]),
        dict(k_scale=k_scale, v_scale=0.5),
    ):
        assert cpu.plain_decode(*arguments, **wrong) is None
        with pytest.raises(ValueError):
            kernels.paged_decode(*tensors, scale=0.3, **wrong)
    halves = [tensor.half() if tensor.dtype is torch.float32 else tensor for tensor in tensors]
    mixed = (halves[0], torch.zeros(tensors[1].shape), *halves[2:])  # an own cache of another dtype than the query's
    assert cpu.plain_decode(*mixed, 0.3, 0, 0.0, None, v_scale=v_scale) is None
    with pytest.raises(ValueError):
        kernels.paged_decode(*mixed, scale=0.3, v_scale=v_scale)


def test_scales_of_channels_are_folded_into_the_query():
    torch.manual_seed(1)
    channels = torch.rand(2, 24) + 0.2
    case = build([30, 0, 9], head_dim=24, dtype=torch.float32)
    rows = torch.where(case.key_cache.isfinite(), case.key_cache, 0)
    codes = kernels.quantize(rows, channels[:, None] / 40, INT8)
    plain = replace(case, key_cache=kernels.dequantize(codes, channels[:, None] / 40))
    ours = replace(case, key_cache=codes, options=case.options | {"k_scale": channels / 40})
    ref, _ = expected(plain)
    within(ours.run("c")[0], ref, limits(case, "c", ref), "out")


def test_the_bench_compares_formats_with_own_pages(threads, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "kernels" / "benchmarks")
    import bench_quantized

    threads(1)
    bench_quantized.main(["--quick", "--seconds", "0", "--threads", "1", "--json", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (row["case"], row["dtype"], row["backend"]) == ("2 x 64", "bfloat16", "c")
    for name in ("fp8_e4m3", "fp8_e5m2", "int8"):
        assert row[f"{name}_us"] > 0 and row[f"times_{name}"] > 0 and row[f"write_{name}_us"] > 0
    with pytest.raises(SystemExit, match="multiples of the block size 16, got 100"):
        bench_quantized.main(["--quick", "--contexts", "100"])
