"""reshape_and_cache and copy_blocks put every byte where a plain loop puts it, and touch nothing else."""

import pytest
import torch

import hf_paged_kernels as kernels

NAN = float("nan")


@pytest.fixture(autouse=True, params=[name for name in ("reference", "c") if name in kernels.BACKENDS])
def each_backend(request):
    with kernels.backend(request.param):
        yield


@pytest.mark.parametrize("slots", [[5, 0, 23, 11], [-1, 7, -1, 2], [3, -1, -1, -1], [-1] * 4, []])
def test_reshape_and_cache(slots):
    num_tokens = len(slots)
    key = torch.randn(2, num_tokens, 5).transpose(0, 1).requires_grad_()  # [T, KH, Dk], a view
    value = torch.randn(3, 2, num_tokens).permute(2, 1, 0)
    with torch.inference_mode(num_tokens % 2 == 0):  # caches made under inference_mode can be written outside
        key_cache, value_cache = torch.full((6, 2, 4, 5), NAN), torch.full((6, 2, 4, 3), NAN)
    expected = [key_cache.clone(), value_cache.clone()]
    for t, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // 4, :, slot % 4] = key[t].detach()
            expected[1][slot // 4, :, slot % 4] = value[t]
    mapping = torch.tensor(slots, dtype=torch.int64)
    assert kernels.reshape_and_cache(key, value, key_cache, value_cache, mapping) is None
    torch.testing.assert_close([key_cache, value_cache], expected, rtol=0, atol=0, equal_nan=True)
    assert not key_cache.requires_grad
    with torch.inference_mode():
        kernels.reshape_and_cache(key, value, key_cache, value_cache, mapping)


@pytest.mark.parametrize("pairs", [[], [[0, 3]], [[0, 1], [1, 2], [2, 3]], [[0, 1], [1, 0]], [[2, 2]]])
def test_copy_blocks_reads_before_it_writes(pairs):
    caches = torch.randn(5, 2, 4, 3), torch.randn(5, 2, 4, 6)
    before = [cache.clone() for cache in caches]
    assert kernels.copy_blocks(*caches, torch.tensor(pairs, dtype=torch.int64).view(-1, 2)) is None
    origin = {destination: source for source, destination in pairs}
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[origin.get(b, b) for b in range(5)]])
