"""8-bit caches in Triton: codes bit for bit those of `quantize`, attention within the bounds of kernel_cases.py.

Those bounds hold against float64 attention over the numbers that codes and scales mean. Every slot that no query may
see holds NaN, in its codes and in its scales.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import build, expected, limits, on, within

import hf_paged_kernels as kernels
from hf_paged_kernels.triton import fp8, paged_attention, runtime

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
CODED = [E4M3, E5M2, INT8]
NAN = float("nan")
SHORT = {None: "own", E4M3: "e4m3", E5M2: "e5m2", INT8: "int8", F32: "fp32", BF16: "bf16", F16: "fp16", F64: "fp64"}
PAIRS = [pair for pair in itertools.product([None, *CODED], repeat=2) if pair != (None, None)]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, of NaN and overflow


def named(value):
    """Of a parameter; one that pytest names well itself stays."""
    if isinstance(value, tuple) and set(value) <= set(SHORT):
        return "+".join(SHORT[one] for one in value)
    return SHORT.get(value) if isinstance(value, torch.dtype) else None


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_bits(one, other):
    return torch.equal(as_bytes(one), as_bytes(other))


# -- codec -----------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(out, codes, number, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, fp8.decode(tl.load(codes + at), out.dtype.element_ty, FORMAT, number))


@triton.jit
def encode_kernel(codes, x, scale, number, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(codes + at, fp8.encode(tl.load(x + at), tl.load(scale + at), number))


@pytest.mark.parametrize("known", ["known", "any"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=named)
@pytest.mark.parametrize("kind", CODED, ids=named)
def test_every_code_is_read_exactly(kind, dtype, known):
    runtime.architecture_of(torch.empty(0, device=DEVICE))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    name, number = (fp8.FORMATS[kind], -1) if known == "known" else ("any", fp8.NUMBERS[kind])
    decode_kernel[(1,)](out, codes, number, name, 256)
    wanted = kernels.dequantize(codes.view(kind), torch.ones((), device=DEVICE))
    assert torch.equal(out.isnan(), wanted.isnan())
    # Bits: zeros keep their signs. Nothing is rounded, so both ways lead to the same number.
    assert same_bits(out.float().nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


def hard_numbers(kind) -> torch.Tensor:
    """Every float32 that lies on the border of two codes or next to it, what float32 has of odd numbers, and noise."""
    grid = kernels.dequantize(torch.arange(256, dtype=torch.uint8).view(kind), torch.ones(()))
    grid = grid[grid.isfinite()].unique()
    middles = (grid[1:] + grid[:-1]) / 2  # exact: one bit more than the codes have
    near = torch.cat([grid, middles])
    near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))])
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, NAN, -NAN, 2**-149, -(2**-149), 2**-126, 3.4028235e38])
    bits = torch.randint(-(2**31), 2**31 - 1, (2**14,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return torch.cat([near, odd, bits.view(F32)])


@pytest.mark.parametrize("kind", CODED, ids=named)
def test_every_number_is_rounded_as_in_torch(kind):
    numbers, size = hard_numbers(kind), 4096
    scales = [1.0, 0.37, 3e-39, 2**-126, 1e38, 0.0, torch.inf, NAN]
    x = torch.cat([numbers, *(numbers * scale for scale in scales[1:5]), numbers[-4096:].repeat(3)])
    counts = torch.tensor([len(numbers)] * 5 + [4096] * 3)
    scale = torch.tensor(scales).repeat_interleave(counts)
    room = -len(x) % size
    x, scale = (torch.nn.functional.pad(tensor, (0, room), value=1.0).to(DEVICE) for tensor in (x, scale))
    codes = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    encode_kernel[(len(x) // size,)](codes, x, scale, fp8.NUMBERS[kind], size)
    wanted = kernels.quantize(x, scale, kind).view(torch.uint8)
    wrong = (codes != wanted).nonzero()
    assert not len(wrong), [(x[i].item(), scale[i].item(), codes[i].item(), wanted[i].item()) for i in wrong[:5, 0]]


# -- writes ----------------------------------------------------------------------------------------


def new_cache(shape, kind, seed):
    """Random bytes: what is not written has to keep them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * kind.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(kind).to(DEVICE)


def rows_of(shape, dtype, seed):
    """Rows of very different magnitudes; one of zeros, one with NaN and infinities, one of nothing else."""
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(
        -3, shape[0] - 3
    ).view(-1, 1, 1)
    rows[1] = 0.0
    rows[2, :, :3] = torch.tensor([NAN, torch.inf, -torch.inf])
    rows[3, 0] = torch.inf
    rows[4] *= 1e-30
    return rows.to(dtype)


def scales_of(kinds, caches, static, seed):
    """Scales for the caches that hold codes; static: "" (dynamic), "head", or "channel" (of keys)."""
    generator = torch.Generator().manual_seed(seed)
    scales = []
    for side, (kind, cache) in enumerate(zip(kinds, caches, strict=True)):
        shape = cache.shape[:3] if not static else cache.shape[1:2]
        if static == "channel" and side == 0:
            shape = (cache.shape[1], cache.shape[3])
        scales.append((torch.rand(*shape, generator=generator) + 0.01).to(DEVICE) if kind else None)
    return scales


LAYOUTS = {
    "contiguous": lambda rows: rows.clone(),
    "part of qkv": lambda rows: torch.cat([rows, rows, rows], 1)[:, rows.shape[1] : 2 * rows.shape[1]],
    "every other lane": lambda rows: torch.stack([rows, rows], -1).flatten(-2)[..., ::2],
}


def check_write(pair, dtype, dims, static="", layout="contiguous", heads=2, block=4):
    slots = torch.tensor([5, 18, 23, 0, -1, 14, 9], device=DEVICE)
    rows = [LAYOUTS[layout](rows_of((7, heads, dim), dtype, dim).to(DEVICE)) for dim in dims]
    caches = [
        new_cache((24 // block, heads, block, dim), kind or dtype, dim) for dim, kind in zip(dims, pair, strict=True)
    ]
    scales = scales_of(pair, caches, static, 3)
    results = {}
    for name in ("triton", "reference"):
        into = [tensor if tensor is None else tensor.clone() for tensor in (*caches, *scales)]
        with kernels.backend(name):
            kernels.reshape_and_cache(*rows, *into[:2], slots, k_scale=into[2], v_scale=into[3])
        results[name] = [tensor for tensor in into if tensor is not None]
    assert all(map(same_bits, *results.values()))


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_reshape_and_cache_of_each_pair(pair):
    check_write(pair, BF16, (32, 16))


@pytest.mark.parametrize("static", ["head", "channel"])
@pytest.mark.parametrize("kind", CODED, ids=named)
def test_reshape_and_cache_with_fixed_scales(kind, static):
    check_write((kind, CODED[CODED.index(kind) - 1]), BF16, (32, 16), static)
    check_write((kind, None) if static == "channel" else (None, kind), F32, (16, 20), static, block=3)


@pytest.mark.parametrize(
    "dtype, dims, layout, heads",
    [
        (F32, (64, 80), "part of qkv", 2),
        (F16, (12, 5), "contiguous", 9),
        (F16, (130, 8), "every other lane", 1),
        (F64, (80, 16), "every other lane", 2),
        (F64, (7, 16), "part of qkv", 1),
    ],
)
def test_reshape_and_cache_of_each_layout(dtype, dims, layout, heads):
    check_write((E4M3, INT8), dtype, dims, "", layout, heads)
    if dtype is not F64:  # the kernels have none, but codes of it
        check_write((E5M2, None), dtype, dims, "", layout, heads)
        check_write((None, E5M2), dtype, dims, "head", layout, heads)


@pytest.mark.parametrize("sizes", [(2, 4, 16, 32), (1, 3, 5, 3), (1, 1, 12, 9)])
@pytest.mark.parametrize("static", ["", "head"])
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (INT8, None), (None, E5M2)], ids=named)
def test_copy_blocks(pair, static, sizes):
    heads, block, *dims = sizes
    caches = [new_cache((6, heads, block, dim), kind or F32, dim) for dim, kind in zip(dims, pair, strict=True)]
    scales = scales_of(pair, caches, static, 4)
    tensors = [tensor for tensor in (*caches, *scales) if tensor is not None]
    wanted = [as_bytes(tensor).clone() for tensor in tensors]
    moves = [(0, 1), (1, 2), (2, 0), (4, 3), (4, 5)]
    for want, tensor in zip(wanted, tensors, strict=True):
        if tensor.dim() > 1:
            for source, target in moves:
                want[target] = as_bytes(tensor)[source]
    with kernels.backend("triton"):
        kernels.copy_blocks(*caches, torch.tensor(moves, device=DEVICE), k_scale=scales[0], v_scale=scales[1])
    assert all(torch.equal(as_bytes(tensor), want) for tensor, want in zip(tensors, wanted, strict=True))


# -- attention -------------------------------------------------------------------------------------


def coded(case, pair, static="", seed=0):
    """(the case with its caches in these formats, the same in the numbers that they mean, as float64)."""
    rng, names = random.Random(seed), ("key_cache", "value_cache")
    codes, values, scales = {}, {}, {}
    for name, kind in zip(names, pair, strict=True):
        cache = getattr(case, name)
        codes[name], values[name], scales[f"{name[0]}_scale"] = cache, cache.double(), None
        if kind is None:
            continue
        unseen = ~cache.isfinite()
        wide = cache.float()
        if static:
            scale = torch.rand(cache.shape[1], generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.01
            along = scale[:, None, None]
        else:
            scale = kernels.dynamic_scale(wide, kind)
            scale[unseen.all(-1)] = rng.choice([NAN, torch.inf, 1.0])
            along = scale[..., None]
        codes[name] = kernels.quantize(wide.masked_fill(unseen, NAN), along, kind)
        values[name] = kernels.dequantize(codes[name], along, F64)
        scales[f"{name[0]}_scale"] = scale
    return (
        on(replace(case, **codes, options=case.options | scales), DEVICE),
        on(replace(case, **values, options=case.options), DEVICE),
    )


def check(case, pair, static="", seed=0):
    """Triton on codes against float64, and torch's reference, which reads the same codes, for good measure."""
    with_codes, plain = coded(case, pair, static, seed)
    ref, ref_lse = expected(plain)
    limit = limits(plain, "triton", ref)
    for backend in ("triton", "reference"):
        out, lse = with_codes.run(backend)
        assert out.dtype == case.query.dtype
        within(out, ref, limit, f"{backend} out")
        within(lse, ref_lse, 1e-5 * ref_lse.abs().clamp(min=1), f"{backend} lse")
    return with_codes


OPS = pytest.mark.parametrize("chunks", [None, [1, 7, 0]], ids=["decode", "prefill"])
LENS = [19, 7, 0]


@OPS
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=named)
@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_each_pair(pair, dtype, chunks, small_tiles):
    check(build(LENS, chunks, dtype=dtype, head_dim=16, kv_heads=1, seed=1), pair)


FEATURES = {
    "static": dict(),
    "window": dict(window=7),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "sizes": dict(head_dim=24, head_dim_v=5),
    "all": dict(window=11, softcap=2.0, sinks=True, starts=[3, 7, 0], head_dim=80, head_dim_v=48, block_size=5),
}


@OPS
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (INT8, E5M2), (None, INT8)], ids=named)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, pair, chunks, small_tiles):
    dtype = {"window": F16, "sinks": BF16}.get(feature, F32)
    options = dict(head_dim=16) | FEATURES[feature]
    check(build(LENS, chunks, dtype=dtype, **options, seed=2), pair, feature == "static", seed=2)


@pytest.mark.parametrize("pair, dtype", [((E4M3, E4M3), BF16), ((E5M2, E5M2), F16), ((INT8, None), F32)], ids=named)
@pytest.mark.parametrize("chunks", [None, [1, 5]], ids=["decode", "prefill"])
def test_parts(pair, dtype, chunks, monkeypatch, small_tiles):
    monkeypatch.setattr(paged_attention, "MIN_PART", 1)
    monkeypatch.setattr(paged_attention, "choose_splits", lambda *_: 3)
    check(build([70, 33], chunks, dtype=dtype, head_dim=16, kv_heads=1, sinks=True, seed=3), pair)


@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (128, 3), (256, 1), (144, 32)])
def test_configured_tiles(head_dim, block_size):
    check(
        build([70, 9], [3, 9], dtype=BF16, head_dim=head_dim, block_size=block_size, kv_heads=1, seed=4), (E4M3, E4M3)
    )
    check(build([70, 9], dtype=F16, head_dim=head_dim, block_size=block_size, kv_heads=1, seed=4), (INT8, INT8))


@OPS
@pytest.mark.parametrize("power", [-8, 0, 12])
@pytest.mark.parametrize("kind", CODED, ids=named)
def test_float16_holds_what_scales_do_not(kind, power, chunks, small_tiles):
    # Scales of e5m2 are 2e-5 where values are about 1: less than float16 can hold well, and codes times scales of
    # 1e5 are more. One row has far larger values than the others, and none of the weight.
    case = build(LENS, chunks, dtype=F16, head_dim=16, kv_heads=1, seed=5)
    case = replace(case, value_cache=case.value_cache * 2.0**power)
    with_codes = check(case, (None, kind))
    if kind is E5M2 and power == 0:
        scale = with_codes.options["v_scale"]
        assert scale[scale.isfinite() & (scale < 1)].max() < torch.finfo(F16).tiny


@OPS
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=named)
def test_large_and_small_values_of_one_sequence(dtype, chunks, small_tiles):
    case = build(LENS, chunks, dtype=dtype, head_dim=16, kv_heads=1, seed=6)
    spread = 10.0 ** torch.arange(-4, 4).repeat(100)[: case.value_cache.shape[0]].view(-1, 1, 1, 1)
    check(replace(case, value_cache=(case.value_cache.float() * spread).to(dtype)), (INT8, E5M2))


def test_channel_scales_go_into_the_query(small_tiles):
    case = build(LENS, head_dim=16, seed=7)
    scale = torch.rand(2, 16, generator=torch.Generator().manual_seed(7)) * 0.05 + 0.01
    codes = kernels.quantize(case.key_cache.nan_to_num(nan=NAN, posinf=NAN), scale[:, None], INT8)
    plain = replace(
        case, key_cache=kernels.dequantize(codes, scale[:, None], F64), value_cache=case.value_cache.double()
    )
    ref, _ = expected(plain)
    options = case.options | {"k_scale": scale, "v_scale": None}
    out, _ = on(replace(case, key_cache=codes, options=options), DEVICE).run("triton")
    within(out.cpu(), ref, limits(plain, "triton", ref), "out")


@pytest.mark.parametrize("where", ["code", "scale"])
@pytest.mark.parametrize("kind", CODED, ids=named)
def test_a_nan_that_is_seen_comes_through(kind, where, small_tiles):
    case, _ = coded(build([20, 9], dtype=BF16, head_dim=16, kv_heads=1, seed=8), (kind, kind))
    block = int(case.index[0][0, 1])
    if where == "scale":
        case.options["v_scale"][block, 0, 2] = NAN
    else:
        case.value_cache.view(torch.uint8)[block, 0, 2] = 0x80 if kind is INT8 else 0x7F
    out, lse = case.run("triton")
    assert out[0].isnan().all() and out[1].isfinite().all() and lse.isfinite().all()
    block = int(case.index[0][1, 0])
    if where == "scale":
        case.options["k_scale"][block, 0, 1] = NAN
    else:
        case.key_cache.view(torch.uint8)[block, 0, 1, 3] = 0x80 if kind is INT8 else 0x7F
    out, lse = case.run("triton")
    assert out[1].isnan().all() and lse[1].isnan().all() and lse[0].isfinite().all()


def test_what_the_backend_refuses():
    case, _ = coded(build([5], head_dim=16, seed=9), (E4M3, INT8))
    with pytest.raises(
        ValueError, match="query: the Triton backend takes float32, bfloat16, float16, got torch.float64"
    ):
        replace(case, query=case.query.double()).run("triton")
