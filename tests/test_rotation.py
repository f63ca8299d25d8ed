"""The rotation of keys and queries: the same scores, exact entries, and less lost of keys with large channels."""

import math
from functools import cache

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig

from hf_paged import PagedCache
from hf_paged.rotation import Rotation, part_size, rotation_of
from hf_paged_kernels import cpu, hadamard_product
from hf_paged_kernels.cpu import hadamard

needs_c = pytest.mark.skipif(cpu.load()[0] is None, reason="needs the C extension")
CPU = torch.device("cpu")
SIZES = [2, 4, 5, 8, 48, 64, 80, 96, 128, 192, 256, 512]


def rotation(size, dtype=torch.float64) -> Rotation:
    return Rotation(size, dtype, CPU)


@pytest.mark.parametrize("size", SIZES)
def test_scores_are_those_of_keys_and_queries_as_they_come(size):
    query, key = torch.randn(2, 3, 5, size, dtype=torch.float64)
    one = rotation(size)
    torch.testing.assert_close(one.queries(query) @ one.keys(key).mT, query @ key.mT, rtol=0, atol=1e-11)
    torch.testing.assert_close(one.keys_back(one.keys(key)), key, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_entries_are_powers_of_two_that_low_precision_holds(size):
    one = rotation(size)
    for matrix in (one._for_keys, one._for_queries):
        assert matrix.shape == (part_size(size), part_size(size))
        entries = matrix.abs().unique()
        assert len(entries) == 1 and math.log2(entries.item()).is_integer()
        assert torch.equal(matrix.to(torch.float16).double(), matrix)


def test_parts_are_rotated_by_themselves():
    key = torch.randn(3, 2, 48, dtype=torch.float64)
    parts = [rotation(16).keys(part) for part in key.split(16, dim=-1)]
    assert torch.equal(rotation(48).keys(key), torch.cat(parts, -1))


def test_autocast_does_not_round_the_products():
    one, key = rotation(64, torch.float32), torch.randn(5, 2, 64)
    for operation in (one.keys, one.queries, one.keys_back):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = operation(key)
        assert under.dtype == torch.float32 and torch.equal(under, operation(key))


def test_sizes_and_dtypes():
    assert [part_size(size) for size in (1, 5, 12, 64, 80, 96, 576)] == [1, 1, 4, 64, 16, 32, 64]
    assert rotation_of(5, torch.float32, CPU) is None
    assert rotation_of(64, torch.bfloat16, CPU) is rotation_of(64, torch.bfloat16, CPU)
    key = torch.randn(7, 2, 64)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        one = rotation_of(64, dtype, CPU)
        assert one.keys(key.to(dtype)).dtype == one.keys_back(key.to(dtype)).dtype == wide
        assert one.queries(key.to(dtype)).dtype == dtype
    low = rotation_of(64, torch.bfloat16, CPU)
    assert torch.equal(low.queries(key.bfloat16()), low.keys(key.bfloat16()).bfloat16())  # 64: both factors are 1/8


def test_a_rotation_made_under_inference_mode_takes_gradients():
    rotation_of.cache_clear()
    with torch.inference_mode():
        made = rotation_of(16, torch.float32, CPU)
    query = torch.randn(3, 16, requires_grad=True)
    made.queries(query).square().sum().backward()
    torch.testing.assert_close(query.grad, 2 * query.detach())  # 16: orthogonal by itself


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_less_is_lost_of_keys_with_a_few_large_channels(name):
    """What counts is the error of the scores, which large channels of keys and queries make together."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, 64, 64, generator=generator)
    for states in (query, key):
        states[..., [3, 17]] *= 20
    lost = {}
    for rotate in (None, False):
        config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=128)
        cache = PagedCache(config, {"kv_cache_dtype": f"k:{name}", "rotate_keys": rotate})
        read = cache.update(key, key, 0)[0] + 0
        lost[rotate] = float((query @ (read - key).mT).square().mean().sqrt())
    assert lost[None] < 0.6 * lost[False], lost


# -- sums and differences in C in place of the product ---------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit, relative
OPERATIONS = ("keys", "queries", "keys_back")


@cache
def hadamard_matrix(size: int) -> torch.Tensor:
    """By its definition: -1 to the number of ones that the two indices have in common."""
    common = torch.arange(size)[:, None] & torch.arange(size)
    ones = sum((common >> bit) & 1 for bit in range(size.bit_length()))
    return 1 - 2 * (ones % 2).double()


def product(states: torch.Tensor, size: int, factor: float) -> torch.Tensor:
    return (states.double().unflatten(-1, (-1, size)) @ hadamard_matrix(size)).flatten(-2) * factor


def views(size: int, dtype: torch.dtype):
    """Rows as models hand them over, and as they might."""
    packed = torch.randn(1, 7, 3, size).to(dtype)
    yield packed.transpose(1, 2)  # [batch, heads, tokens, head_dim]
    yield packed[0]
    yield packed[0, :, 1]  # of one head
    yield packed.transpose(1, 2)[..., -1:, :]  # the last token
    yield torch.randn(2, 7, 3, size + 5).to(dtype)[1:, ::2, :, 3 : 3 + size]  # unaligned
    yield torch.randn(3, size).to(dtype).expand(4, 3, size)
    yield torch.randn(size, 5).to(dtype).T  # elements apart
    yield torch.randn(size).to(dtype)
    yield torch.randn(1, 3, 0, size).to(dtype)
    yield torch.randn(2, 0, 3, size).to(dtype).transpose(1, 2)[..., :size]
    yield torch.randn(2, 1, 2, 2, size).to(dtype)  # five dimensions


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 80, 96, 128, 256, 512, 1024, 1536])
def test_it_is_the_product(size, dtype, instruction_set):
    one, part, seen = rotation_of(size, dtype, CPU), part_size(size), 0
    for states in views(size, dtype):
        served = hadamard_product(states, part, 1.0, dtype)
        assert (served is None) == (states.dim() == 5)
        for operation, factor in zip(OPERATIONS, (one._key_factor, *[one._query_factor] * 2), strict=True):
            got = []
            for name in cpu.instruction_sets():
                instruction_set(name)
                got.append(getattr(one, operation)(states))
            want, kind = product(states, part, factor), dtype if operation == "queries" else torch.float32
            assert got[0].dtype == kind and got[0].shape == states.shape
            assert served is None or got[0].is_contiguous()
            assert all(torch.equal(got[0], other) for other in got)
            magnitude = states.double().abs().unflatten(-1, (-1, part)).sum(-1, keepdim=True) * factor
            roundings = part if served is None else math.log2(part)
            bound = roundings * 2**-24 * magnitude.expand(*magnitude.shape[:-1], part).flatten(-2)
            bound = 1.01 * bound + ROUNDING[kind] * want.abs() + 2**-25  # the last of denormal float16
            assert bool(((got[0].double() - want).abs() <= bound).all())
            seen += 1
    assert seen == 33


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_no_other_one_nor_on_threads(dtype, threads):
    rows = torch.randn(1, 2000, 9, 64).to(dtype).transpose(1, 2)
    one = rotation_of(64, dtype, CPU)
    for operation in (one.keys, one.queries):
        got = []
        for count in (1, 2, 3, 7):
            threads(count)
            got.append(operation(rows))
        assert all(torch.equal(got[0], other) for other in got)
        for head, token in ((0, 0), (4, 999), (8, 1999)):
            assert torch.equal(operation(rows[0, head, token]), got[0][0, head, token])
    rows[0, 3, 5, 7] = math.nan
    spoiled = operation(rows).isnan()
    assert spoiled[0, 3, 5].all() and spoiled.sum() == 64


def test_without_the_library_it_is_the_product_all_the_same(monkeypatch):
    states, sums = torch.randn(1, 5, 3, 64).transpose(1, 2), {}
    one = rotation_of(64, torch.float32, CPU)
    for operation in OPERATIONS:
        sums[operation] = getattr(one, operation)(states)
    monkeypatch.setattr(hadamard, "load", lambda: (None, "none here"))
    hadamard._entry.cache_clear()
    try:
        assert hadamard_product(states, 64, 1.0, torch.float32) is None
        for operation in OPERATIONS:
            by_matrix = getattr(one, operation)(states)
            assert torch.equal(by_matrix, states @ one._for_queries)  # 64: both factors are 1/8
            torch.testing.assert_close(by_matrix, sums[operation], rtol=0, atol=2e-6)
    finally:
        hadamard._entry.cache_clear()


@pytest.mark.parametrize("size", [2, 64, 80, 128, 256])
def test_back_to_the_keys_but_for_rounding(size):
    one, key = rotation_of(size, torch.float32, CPU), torch.randn(4, 50, size) * 100
    lost = (one.keys_back(one.keys(key)) - key).norm(dim=-1) / key.norm(dim=-1)
    assert lost.max() < 1e-6


@pytest.mark.parametrize("size", [16, 48])
def test_gradients(size):
    one = rotation_of(size, torch.float32, CPU)
    states = torch.randn(3, 5, size, requires_grad=True)
    for operation, factor in (("keys", one._key_factor), ("queries", one._query_factor)):
        (gradient,) = torch.autograd.grad(getattr(one, operation)(states)[..., 0].sum(), states)
        want = torch.zeros(size)
        want[: part_size(size)] = factor  # the first column of H: ones
        assert torch.equal(gradient, want.expand(3, 5, size))
        with torch.no_grad():
            assert not getattr(one, operation)(states).requires_grad


@needs_c
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_it_is_left_to_the_matrix_where_somebody_looks_on():
    one, states, served = rotation_of(64, torch.float32, CPU), torch.randn(3, 5, 64), []
    want = product(states, 64, one._query_factor).float()

    def check(got, want=want):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)

    def seen(states):
        served.append(hadamard_product(states, 64, 1.0, torch.float32))
        return one.queries(states)

    check(torch.vmap(seen)(states))
    check(torch.func.jvp(seen, (states,), (states,))[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(states, states)
        check(forward_ad.unpack_dual(seen(dual)).tangent)
    check(torch.jit.trace(seen, states, check_trace=False)(2 * states), 2 * want)
    check(make_fx(seen)(states)(2 * states), 2 * want)
    check(seen(torch.nn.Parameter(states)).detach())
    check(seen(torch.complex(states, -states).conj().imag))  # holds -states, and says that it is to be negated
    assert len(served) == 7 and all(result is None for result in served)
    check(torch.compile(one.queries, fullgraph=True, backend="eager", dynamic=True)(states))
    seen(states)
    assert served[-1] is not None
    for other in (states.double(), states.long(), states.to("meta"), states.to_sparse(), torch.tensor(1.0)):
        assert hadamard_product(other, 64, 1.0, torch.float32) is None
    for part in (0, 1, 3, 128, 2048):
        assert hadamard_product(states, part, 1.0, torch.float32) is None
    assert hadamard_product(states, 64, 1.0, torch.float64) is None
    assert hadamard_product(torch.randn(2048), 2048, 1.0, torch.float32) is None


def test_another_size_than_the_rotations_is_an_error():
    one = rotation_of(64, torch.float32, CPU)
    for states in (torch.randn(3, 128), torch.randn(3, 32)):
        with pytest.raises(RuntimeError, match="shapes"):
            one.keys(states)
