"""The rotation of keys and queries: the same scores, exact entries, and less lost of keys with large channels."""

import math

import pytest
import torch
from transformers import LlamaConfig

from hf_paged import PagedCache
from hf_paged.rotation import Rotation, part_size, rotation_of

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
