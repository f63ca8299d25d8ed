"""The codec of 8-bit keys and values, and the plain torch operators over it."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_paged_kernels as kernels

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
ids = [str(dtype).removeprefix("torch.") for dtype in FORMATS]
each_format = pytest.mark.parametrize("dtype", FORMATS, ids=ids)


def value_of(code: int, dtype: torch.dtype) -> float:
    """What a code means, by the formats' definition: sign, exponent, mantissa, written out."""
    if dtype is torch.int8:
        return math.nan if code == 0x80 else float(code - 256 if code > 127 else code)
    mantissa_bits = 3 if dtype is torch.float8_e4m3fn else 2
    bias = 7 if dtype is torch.float8_e4m3fn else 15
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if dtype is torch.float8_e4m3fn and code & 0x7F == 0x7F:
        return math.nan
    if dtype is torch.float8_e5m2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def nearest(y: float, dtype: torch.dtype) -> set[int]:
    """Codes whose value is nearest to y, of equally near ones those with an even code; both zeros for a zero."""
    values = {code: value_of(code, dtype) for code in range(256)}
    finite = {code: value for code, value in values.items() if math.isfinite(value)}
    distance = min(abs(value - y) for value in finite.values())
    near = [code for code, value in finite.items() if abs(value - y) == distance]
    if len({finite[code] for code in near}) > 1:
        near = (
            [code for code in near if finite[code] % 2 == 0] if dtype is torch.int8 else [c for c in near if c % 2 == 0]
        )
    return set(near)


@each_format
def test_every_code_reads_as_the_format_says(dtype):
    read = kernels.dequantize(all_codes(dtype), torch.ones(()))
    wanted = torch.tensor([value_of(code, dtype) for code in range(256)])
    assert torch.equal(read.view(torch.int32)[~wanted.isnan()], wanted.view(torch.int32)[~wanted.isnan()])
    assert read[wanted.isnan()].isnan().all()


@each_format
def test_every_code_survives_reading_and_writing(dtype):
    codes = all_codes(dtype)
    again = kernels.quantize(kernels.dequantize(codes, torch.ones(())), torch.ones(()), dtype)
    same = again.view(torch.uint8) == codes.view(torch.uint8)
    lost = kernels.dequantize(codes, torch.ones(())).isnan()
    assert same[~lost].all()
    assert (again.view(torch.uint8)[lost] == (0x80 if dtype is torch.int8 else 0x7F)).all()


@each_format
@given(bits=st.integers(0, 2**32 - 1))
def test_a_value_becomes_the_nearest_code(dtype, bits):
    x = struct.unpack("<f", struct.pack("<I", bits))[0]
    code = int(kernels.quantize(torch.tensor([x]), torch.ones(1), dtype).view(torch.uint8))
    qmax = kernels.QMAX[dtype]
    if math.isnan(x) or (math.isinf(x) and dtype is not torch.float8_e5m2):
        assert code == (0x80 if dtype is torch.int8 else 0x7F)
    elif math.isinf(x):
        assert code == (0x7C if x > 0 else 0xFC)
    else:
        assert code in nearest(min(max(x, -qmax), qmax), dtype)


@each_format
@given(y=st.floats(-1.25, 1.25, width=32), scale=st.floats(2.0**-100, 2.0**100, width=32))
def test_values_of_the_range_become_the_nearest_code(dtype, y, scale):
    x = torch.tensor([y * kernels.QMAX[dtype]]) * scale
    code = int(kernels.quantize(x, torch.tensor([scale]), dtype).view(torch.uint8))
    scaled = float((x / torch.tensor([scale]))[0])  # as the contract divides
    assert code in nearest(min(max(scaled, -kernels.QMAX[dtype]), kernels.QMAX[dtype]), dtype)


@each_format
def test_ties_go_to_the_even_code(dtype):
    values = sorted({value_of(code, dtype) for code in range(256) if math.isfinite(value_of(code, dtype))})
    middles = torch.tensor([(a + b) / 2 for a, b in zip(values, values[1:], strict=False)])
    codes = kernels.quantize(middles, torch.ones(()), dtype).view(torch.uint8).tolist()
    for middle, code in zip(middles.tolist(), codes, strict=True):
        assert code in nearest(middle, dtype)


@each_format
def test_dynamic_scales_use_the_whole_range(dtype):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    x[4, 2], x[5, 3], x[6, 1] = math.nan, math.inf, -math.inf
    scale = kernels.dynamic_scale(x, dtype)
    finite = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1)
    wanted = torch.tensor([max(float(a / torch.tensor(kernels.QMAX[dtype])), 2.0**-126) for a in finite])
    assert torch.equal(scale, wanted)
    read = kernels.dequantize(kernels.quantize(x, scale[:, None], dtype), scale[:, None])
    assert torch.equal(read[3], x[3])
    assert read[4, 2].isnan()
    if dtype is torch.float8_e5m2:
        assert read[5, 3] == math.inf and read[6, 1] == -math.inf
    else:
        assert read[5, 3].isnan() and read[6, 1].isnan()
    step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0.5 / 127}[dtype]
    error = (read - x)[7:].abs() / x[7:].abs().amax(-1, keepdim=True)
    assert float(error.max()) <= step * 1.001


def paged(seed=0, num_blocks=7, kv_heads=2, block_size=4, dim=16, dim_v=8, key=torch.int8, value=torch.float8_e4m3fn):
    """Caches of codes and their scales, every slot full of what must never be seen."""
    caches, scales = [], []
    for dtype, width in ((key, dim), (value, dim_v)):
        quantized = kernels.is_quantized(dtype)
        shape = (num_blocks, kv_heads, block_size, width)
        if quantized:
            caches.append(torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype))
            scales.append(torch.full(shape[:3], math.nan))
        else:
            caches.append(torch.full(shape, math.nan, dtype=dtype))
            scales.append(None)
    return (*caches, *scales)


PAIRS = [(key, value) for key in [torch.float32, *FORMATS] for value in [torch.float32, *FORMATS]][1:]


def reference_rows(x, dtype):
    """x [T, KH, D] as it reads back."""
    if not kernels.is_quantized(dtype):
        return x
    scale = kernels.dynamic_scale(x, dtype)[..., None]
    return kernels.dequantize(kernels.quantize(x, scale, dtype), scale)


@pytest.mark.parametrize("key_dtype,value_dtype", PAIRS)
def test_attention_over_codes_is_attention_over_what_they_read(key_dtype, value_dtype):
    generator = torch.Generator().manual_seed(1)
    key_cache, value_cache, k_scale, v_scale = paged(key=key_dtype, value=value_dtype)
    lens = [9, 6]
    tables = torch.tensor([[5, 0, 3], [1, 6, -1]], dtype=torch.int32)
    keys = [torch.randn(n, 2, 16, generator=generator) * 3 for n in lens]
    values = [torch.randn(n, 2, 8, generator=generator) for n in lens]
    for row, n in enumerate(lens):
        slots = kernels.slot_ids(tables[row], 4)[:n]
        with kernels.backend("reference"):
            kernels.reshape_and_cache(keys[row], values[row], key_cache, value_cache, slots, k_scale, v_scale)
    query = torch.randn(2, 6, 16, generator=generator)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    options = dict(scale=0.25, k_scale=k_scale, v_scale=v_scale)
    with kernels.backend("reference"):
        out = kernels.paged_decode(query, key_cache, value_cache, tables, seq_lens, **options)
        starts = torch.tensor([0, 1, 2], dtype=torch.int32)
        prefill = kernels.paged_prefill(query, key_cache, value_cache, tables, starts, seq_lens, **options)
    for row in range(2):
        k, v = reference_rows(keys[row], key_dtype).double(), reference_rows(values[row], value_dtype).double()
        q = query[row].double().view(2, 3, 16)
        weights = torch.softmax(torch.einsum("hgd,thd->hgt", q, k) * 0.25, dim=-1)
        wanted = torch.einsum("hgt,thd->hgd", weights, v).reshape(6, 8)
        assert torch.allclose(out[row].double(), wanted, atol=1e-5)
        assert torch.allclose(prefill[row].double(), wanted, atol=1e-5)


def test_static_scales_by_head_and_by_channel():
    generator = torch.Generator().manual_seed(2)
    key = torch.randn(8, 2, 16, generator=generator) * torch.logspace(-3, 3, 16)
    value = torch.randn(8, 2, 8, generator=generator)
    key_cache, value_cache, _, _ = paged()
    k_scale, v_scale = key.abs().amax(0) / 127, value.abs().amax((0, 2)) / 448
    tables = torch.tensor([[2, 4]], dtype=torch.int32)
    with kernels.backend("reference"):
        kernels.reshape_and_cache(key, value, key_cache, value_cache, kernels.slot_ids(tables[0], 4), k_scale, v_scale)
        query = torch.randn(1, 4, 16, generator=generator)
        lens = torch.tensor([8], dtype=torch.int32)
        out = kernels.paged_decode(
            query, key_cache, value_cache, tables, lens, scale=0.01, k_scale=k_scale, v_scale=v_scale
        )
    k = kernels.dequantize(kernels.quantize(key, k_scale[None], torch.int8), k_scale[None]).double()
    v_scale = v_scale[None, :, None]
    v = kernels.dequantize(kernels.quantize(value, v_scale, torch.float8_e4m3fn), v_scale).double()
    weights = torch.softmax(torch.einsum("hgd,thd->hgt", query[0].double().view(2, 2, 16), k) * 0.01, dim=-1)
    assert torch.allclose(out[0].double(), torch.einsum("hgt,thd->hgd", weights, v).reshape(4, 8), atol=1e-5)


def test_copied_blocks_take_their_scales_along():
    key_cache, value_cache, k_scale, v_scale = paged()
    key, value = torch.randn(4, 2, 16), torch.randn(4, 2, 8)
    with kernels.backend("reference"):
        kernels.reshape_and_cache(key, value, key_cache, value_cache, torch.arange(8, 12), k_scale, v_scale)
        kernels.copy_blocks(key_cache, value_cache, torch.tensor([[2, 5]]), k_scale, v_scale)
    for cache in (key_cache, value_cache):
        assert torch.equal(cache.view(torch.uint8)[5], cache.view(torch.uint8)[2])
    assert torch.equal(k_scale[5], k_scale[2]) and torch.equal(v_scale[5], v_scale[2])


def test_a_token_without_a_slot_writes_neither_code_nor_scale():
    key_cache, value_cache, k_scale, v_scale = paged()
    before = [tensor.clone() for tensor in (key_cache.view(torch.uint8), k_scale, value_cache.view(torch.uint8))]
    with kernels.backend("reference"):
        slots = torch.tensor([-1, -1, -1])
        key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
        kernels.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale, v_scale)
    assert torch.equal(key_cache.view(torch.uint8), before[0]) and torch.equal(value_cache.view(torch.uint8), before[2])
    assert torch.equal(k_scale.view(torch.int32), before[1].view(torch.int32))


def test_scales_that_do_not_fit_are_named():
    key_cache, value_cache, k_scale, v_scale = paged()
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="k_scale: expected a float32 tensor"):
        kernels.copy_blocks(key_cache, value_cache, pairs, None, v_scale)
    with pytest.raises(ValueError, match=r"v_scale: expected a shape .* got \[2, 8\]"):
        kernels.copy_blocks(key_cache, value_cache, pairs, k_scale, torch.ones(2, 8))
    with pytest.raises(ValueError, match="k_scale: expected dtype torch.float32"):
        kernels.copy_blocks(key_cache, value_cache, pairs, k_scale.double(), v_scale)
    own = torch.zeros(7, 2, 4, 16)
    with pytest.raises(ValueError, match="k_scale: expected None"):
        kernels.copy_blocks(own, value_cache, pairs, k_scale, v_scale)
    with pytest.raises(ValueError, match="query: expected dtype torch.float32"):
        kernels.paged_decode(
            torch.zeros(1, 2, 16, dtype=torch.bfloat16), own, value_cache, torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32), scale=1.0, v_scale=v_scale,
        )  # fmt: skip
