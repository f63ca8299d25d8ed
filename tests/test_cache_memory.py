"""What a PagedCache takes and gives back: growth, the memory budget, padding, windows, stats().

Contract: memory follows the tokens that are held. A pool on demand is at most a sixteenth and 8 blocks larger than
was ever needed; beyond its budget it raises. Left padding that is known and blocks behind a sliding window
are not kept. `stats()` and `storages()` report what is there.
"""

from __future__ import annotations

import copy
import types
import weakref

import psutil
import pytest
import torch
from cache_helpers import WINDOW, Pair, config_of, random_kv

from hf_paged import PagedCache
from hf_paged.storage_meter import live_bytes

LAYERS = 3
BLOCK_BYTES = 2 * 16 * (4 + 4) * 4  # of one layer: heads, tokens, head_dim of K and V, float32


def free_memory(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=num_bytes))


def feed(cache: PagedCache, batch: int, tokens: int) -> None:
    for index in range(LAYERS):
        cache.update(*random_kv(batch, tokens), index)


# Growth


@pytest.mark.parametrize("block_size", [1, 16])
def test_growth_is_bounded_and_keeps_what_is_there(block_size):
    pair = Pair("llama", batch=3, block_size=block_size)
    for tokens in (1, 5, 1, 60, 1, 1, 1, 200, 1, 1):
        pair.update(tokens)
        stats = pair.paged.stats()
        needed = 3 * -(-pair.length // block_size)
        assert stats.blocks_used == needed
        assert stats.blocks_total <= needed + needed // 16 + 8
    pair.check()


def test_growth_is_rare():
    cache, sizes = PagedCache(config_of("llama"), {"block_size": 1}), set()
    for _ in range(400):
        feed(cache, 1, 1)
        sizes.add(cache.stats().blocks_total)
    assert len(sizes) <= 25  # and not one growth, with its copy, for every token


def test_growing_holds_no_more_than_one_tensor_beside_its_successor(monkeypatch):
    made, most, empty = [], [0], torch.empty

    def recording(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.dim() == 4:
            made.append(weakref.ref(tensor))
            most[0] = max(most[0], sum(reference() is not None for reference in made))
        return tensor

    monkeypatch.setattr(torch, "empty", recording)
    cache = PagedCache(config_of("llama"))
    for tokens in (9, 300, 900):
        feed(cache, 2, tokens)
    assert len(made) >= 2 * LAYERS * 3 - 4 and most[0] <= 2 * LAYERS + 1


def test_memory_is_given_back_with_the_cache():
    cache = PagedCache(config_of("gemma3_text"))
    feed(cache, 2, 40)
    tensors = [weakref.ref(tensor) for tensor in cache.storages()]
    assert len(tensors) == 2 * LAYERS
    del cache
    assert all(reference() is None for reference in tensors)  # at once, without the garbage collector


# The memory budget


@pytest.mark.parametrize("fraction", [None, 0.1, 0.9])
def test_the_pools_of_a_cache_stay_within_their_fraction_of_free_memory(monkeypatch, fraction):
    free_memory(monkeypatch, 1_000_000)
    pair = Pair("llama", shape=(2, 32, 16), memory_fraction=fraction)
    limit = 1_000_000 * (fraction or 0.4)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(1000):
            saved = copy.deepcopy(pair.dynamic), dict(pair.fed)
            pair.update(9)
            assert live_bytes(pair.paged) <= limit
    pair.dynamic, pair.fed = saved
    assert limit >= pair.paged.stats().bytes_total > 0.8 * limit  # the budget was there to be used
    for part in ("available of", f"memory_fraction={fraction or 0.4}", "1,000,000", "cpu"):
        assert part in str(caught.value)
    pair.check()
    pair.both("crop", -10)
    pair.trim(pair.length)
    pair.update(10)
    pair.check()


def test_the_pools_of_one_cache_share_its_budget(monkeypatch):
    free_memory(monkeypatch, 1_000_000)
    cache = PagedCache(config_of("gemma3_text"))
    with pytest.raises(RuntimeError, match="needs .*memory_fraction=0.4 of 1,000,000"):
        for _ in range(100):
            feed(cache, 4, 100)
    assert 300_000 < live_bytes(cache) <= 400_000
    cache.check_integrity()


@pytest.mark.parametrize(
    "cache_config, tokens",
    [({"num_blocks": 100}, 9), ({"num_blocks": 50}, 9), ({}, 240)],
    ids=["layer 0 does not fit", "layer 1 does not fit", "layer 1 does not fit on demand"],
)
def test_a_first_forward_beyond_the_budget_leaves_empty_layers(monkeypatch, cache_config, tokens):
    free_memory(monkeypatch, 200_000)
    cache = PagedCache(config_of("llama"), cache_config)
    with pytest.raises(RuntimeError, match="needs .*memory_fraction=0.4 of 200,000"):
        feed(cache, 4, tokens)
    repr(cache)
    assert [cache.get_seq_length(index) for index in range(LAYERS)] == [0, 0, 0]
    assert cache.get_mask_sizes(5, 2) == (5, 0)
    assert cache.layers[2].keys is None and not cache.layers[2].is_initialized
    cache.crop(0)
    cache.check_integrity()
    free_memory(monkeypatch, 10**9)
    fresh = PagedCache(config_of("llama"), cache_config)
    feed(fresh, 2, 30)
    assert fresh.stats().blocks_held == 4


def test_room_to_grow_is_not_taken_from_the_layers_that_follow(monkeypatch):
    """A budget that holds what a forward needs is enough, whatever the first layers would like to have."""
    free_memory(monkeypatch, int(LAYERS * 5 * BLOCK_BYTES / 0.4) + 8)
    pair = Pair("llama", batch=1)
    pair.update(16 * 4)
    pair.update(1)
    pair.check()


# Left padding


@pytest.mark.parametrize("chunk", [48, 7, 1])
def test_left_padding_is_not_stored(chunk):
    starts = [0, 5, 40, 16]
    mask = (torch.arange(48)[None] >= torch.tensor(starts)[:, None]).long()
    cache, (key, value) = PagedCache(config_of("llama")), random_kv(4, 48)
    cache.expect(mask)
    for first in range(0, 48, chunk):
        for index in range(LAYERS):
            held = cache.update(key[:, :, first : first + chunk], value[:, :, first : first + chunk], index)
    real = mask.bool()[:, None, :, None]
    assert torch.equal(held[0] + 0, key.where(real, 0)) and torch.equal(held[1] + 0, value.where(real, 0))
    assert cache.get_seq_length() == 48
    assert cache.stats().blocks_held == 3 + 3 + 1 + 2
    feed(cache, 4, 8)  # columns 48 to 56: only row 2 ends at a block's end
    assert cache.stats().blocks_held == 4 + 4 + 1 + 3
    cache.check_integrity()


def test_padding_that_is_not_on_the_left_is_stored_and_rows_of_padding_hold_nothing():
    cache, (key, value) = PagedCache(config_of("gemma3_text"), {"block_size": 4}), random_kv(3, 12)
    cache.expect(torch.tensor([[0] * 5 + [1, 0, 1] + [0] * 4, [1] * 6 + [0] * 6, [0] * 12]))
    for index in range(LAYERS):
        cache.update(key, value, index)
    keys = cache.layers[2].keys
    assert torch.equal(keys[0, :, 5:], key[0, :, 5:]) and not keys[0, :, :5].any()
    assert torch.equal(keys[1], key[1]) and not keys[2].any()
    cache.check_integrity()
    new_key, new_value = random_kv(3, 1)
    held, _ = cache.update(new_key, new_value, 2)
    assert torch.equal((held + 0)[:, :, 12:], new_key)


def test_a_mask_for_another_batch_is_ignored():
    pair = Pair("llama")
    pair.paged.expect(torch.tensor([[0, 1, 1]]))
    pair.update(3)
    pair.check()


# Sliding windows


@pytest.mark.parametrize("block_size, bound", [(1, WINDOW), (4, 3), (16, 2)])
def test_blocks_behind_the_window_are_given_back(block_size, bound):
    pair = Pair("mistral", block_size=block_size)
    pair.attention = [0, 2]
    for _ in range(200):
        pair.update(1)
        assert pair.paged.stats().blocks_held <= 2 * bound
    assert pair.paged.stats().blocks_total <= 2 * (bound + 1) + 9
    pair.check()
    pair.update(30)
    pair.check()


def test_windows_of_rows_with_padding_and_of_forks():
    cache = PagedCache(config_of("mistral"), {"block_size": 4})
    cache.expect((torch.arange(30)[None] >= torch.tensor([0, 21])[:, None]).long())
    feed(cache, 2, 30)
    fork = cache.fork()
    for _ in range(20):
        feed(cache, 2, 1)
    assert cache.stats().blocks_held <= 2 * 3 and fork.stats().blocks_held <= 2 * 3
    assert cache.stats().blocks_used <= 2 * 6


# stats


def test_stats_of_a_small_example():
    cache = PagedCache(config_of("llama"))
    assert cache.stats().waste == cache.stats().utilization == cache.stats().blocks_total == 0
    feed(cache, 2, 17)
    stats = cache.stats()
    assert (stats.blocks_held, stats.blocks_used, stats.blocks_total, stats.num_layers) == (4, 4, 12, LAYERS)
    assert stats.bytes_held == 4 * LAYERS * BLOCK_BYTES == 12_288
    assert stats.bytes_of_tokens == 34 * LAYERS * BLOCK_BYTES // 16 == 6_528
    assert stats.bytes_total == 12 * LAYERS * BLOCK_BYTES == live_bytes(cache)
    assert stats.waste == pytest.approx(30 / 64) and stats.utilization == pytest.approx(4 / 12)
    cache.batch_repeat_interleave(3)
    assert cache.stats() == stats  # a shared block counts once


def test_storages_name_the_states_of_other_layers_too():
    pair = Pair("qwen3_next")
    pair.update(5)
    states = live_bytes(pair.dynamic) - 2 * 2 * 5 * (4 + 4) * 4  # without the K/V of its one attention layer
    assert states > 0
    assert live_bytes(pair.paged) == states + pair.paged.stats().bytes_total
