"""reshape_and_cache and copy_blocks in Triton: every bit where a plain loop puts it, nothing else touched."""

import pytest
import torch

import hf_paged_kernels as kernels
from hf_paged_kernels.triton import runtime, variants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
BITS = {2: torch.int16, 4: torch.int32}


def random_bits(shape, dtype, seed):
    """Any bits at all, NaN with payloads included: a copy through arithmetic would change some."""
    bits = BITS[dtype.itemsize]
    info, generator = torch.iinfo(bits), torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max, shape, dtype=bits, generator=generator).view(dtype).to(DEVICE)


def same_bits(one, other):
    return torch.equal(one.view(BITS[one.itemsize]), other.view(BITS[other.itemsize]))


LAYOUTS = {
    "contiguous": lambda rows: rows.clone(),
    "heads first": lambda rows: rows.transpose(0, 1).contiguous().transpose(0, 1),
    "part of qkv": lambda rows: torch.cat([rows, rows, rows], 1)[:, rows.shape[1] : 2 * rows.shape[1]],
    "every other lane": lambda rows: torch.stack([rows, rows], -1).flatten(-2)[..., ::2],
    "broadcast": lambda rows: rows[:1].expand(rows.shape),
}


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (8, 72), (12, 5), (256, 16)])
def test_reshape_and_cache(dims, layout, dtype):
    slots = [5, -1, 23, 0, -1, 14]
    heads, block = 3, 4
    rows = [LAYOUTS[layout](random_bits((6, heads, d), dtype, d)) for d in dims]
    caches = [random_bits((6, heads, block, d), dtype, 99) for d in dims]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots):
        for want, row in zip(expected, rows, strict=True):
            if slot >= 0:
                want[slot // block, :, slot % block] = row[token]
    with kernels.backend("triton"):
        kernels.reshape_and_cache(*rows, *caches, torch.tensor(slots, device=DEVICE))
    assert all(map(same_bits, caches, expected))


def test_reshape_and_cache_of_many_heads_in_caches_that_start_anywhere():
    key, value = (random_bits((2, 20, d), torch.bfloat16, d) for d in (64, 8))
    room = [random_bits((3 * 20 * 17 * d + 6,), torch.bfloat16, d) for d in (64, 8)]
    caches = [part[3:-3].view(3, 20, 17, -1) for part in room]  # 6 bytes after a multiple of 16
    assert not runtime.is_aligned(caches[0])
    expected = [part.clone() for part in room]
    for want, row in zip(expected, (key, value), strict=True):
        inside = want[3:-3].view(3, 20, 17, -1)
        inside[2, :, 16], inside[0, :, 1] = row[0], row[1]
    with kernels.backend("triton"):
        kernels.reshape_and_cache(key, value, *caches, torch.tensor([50, 1, 7], device=DEVICE)[:2])
    assert all(map(same_bits, room, expected))


def test_writes_of_nothing():
    cache = random_bits((2, 1, 4, 8), torch.float32, 0)
    before = cache.clone()
    with kernels.backend("triton"):
        none = torch.zeros(0, 1, 8, device=DEVICE)
        kernels.reshape_and_cache(none, none, cache, cache, torch.zeros(0, dtype=torch.int64, device=DEVICE))
        kernels.copy_blocks(cache, cache, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE))
        slots = torch.full((3,), -1, device=DEVICE)
        rows = random_bits((3, 1, 8), torch.float32, 1)
        kernels.reshape_and_cache(rows, rows, cache, cache, slots)
    assert same_bits(cache, before)


PAIRS = {
    "plain": [(0, 3)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "swap": [(4, 5), (5, 4)],
    "cycle and fan": [(0, 1), (1, 2), (2, 0), (4, 3), (4, 5), (6, 6)],
}


@DTYPES
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("sizes", [(2, 16, 64, 64), (1, 3, 5, 12), (2, 17, 80, 8)])
def test_copy_blocks(sizes, pairs, dtype):
    heads, block, *dims = sizes
    caches = [random_bits((7, heads, block, d), dtype, d) for d in dims]
    before = [cache.clone() for cache in caches]
    expected = [cache.clone() for cache in caches]
    for source, destination in PAIRS[pairs]:
        for want, old in zip(expected, before, strict=True):
            want[destination] = old[source]
    table = torch.tensor(PAIRS[pairs], device=DEVICE)
    with kernels.backend("triton"):
        kernels.copy_blocks(*caches, table.T.contiguous().T)
    assert all(map(same_bits, caches, expected))


def test_blocks_larger_than_a_program_copies():
    caches = [random_bits((3, 4, 64, d), torch.float16, d) for d in (40, 8)]
    assert caches[0][0].numel() > 2 * variants.copy_blocks("default", True)["BLOCK"]
    expected = [cache[[1, 0, 0]] for cache in caches]
    with kernels.backend("triton"):
        kernels.copy_blocks(*caches, torch.tensor([[0, 1], [1, 0], [0, 2]], device=DEVICE))
    assert all(map(same_bits, caches, expected))


def test_writes_record_no_autograd_and_pass_inference_mode():
    key = torch.randn(2, 1, 8, device=DEVICE, requires_grad=True)
    with torch.inference_mode():
        cache = torch.zeros(2, 1, 4, 8, device=DEVICE)
    with kernels.backend("triton"):
        kernels.reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([0, 5], device=DEVICE))
    assert torch.equal(cache[1, 0, 1], key[1, 0].detach()) and key.grad is None
    with (
        kernels.backend("triton"),
        pytest.raises(ValueError, match="takes float32, bfloat16, float16, got torch.float64"),
    ):
        kernels.copy_blocks(cache.double(), cache.double(), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE))
