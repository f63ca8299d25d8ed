"""A PagedCache with a fixed number of blocks, and what happens when they run out.

Contract: `num_blocks` blocks are made at once and never more. A forward that does not fit raises RuntimeError with
the counts and leaves every layer, and every fork, as it was; when blocks come back, it goes on.
"""

from __future__ import annotations

import pytest
import torch
from cache_helpers import Pair, config_of, random_kv

from hf_paged import PagedCache
from hf_paged.storage_meter import live_bytes

LAYERS = 3
BLOCK_BYTES = 2 * 16 * (4 + 4) * 4  # of one layer: heads, tokens, head_dim of K and V, float32


def feed(cache: PagedCache, batch: int, tokens: int) -> None:
    for index in range(LAYERS):
        cache.update(*random_kv(batch, tokens), index)


def test_a_fixed_pool_is_made_at_once_and_stays():
    cache = PagedCache(config_of("llama"), {"num_blocks": 7})
    assert cache.stats().bytes_total == 0
    feed(cache, 1, 1)
    assert cache.stats().blocks_total == 7 and live_bytes(cache) == 7 * LAYERS * BLOCK_BYTES
    before = [tensor.data_ptr() for tensor in cache.storages()]
    feed(cache, 1, 7 * 16 - 1)
    assert [tensor.data_ptr() for tensor in cache.storages()] == before


def test_an_exhausted_pool_raises_changes_nothing_and_can_be_used_again():
    pair = Pair("llama", num_blocks=4)
    pair.update(6)
    pair.update(26)
    fork = pair.fork()
    pair.refuse(1, "needs 2 blocks, 0 available of 4")
    pair.refuse(33, "needs 6 blocks, 0 available of 4")
    fork.check()
    del fork
    pair.both("crop", -17)
    pair.trim(15)
    pair.update(17)
    pair.refuse(1, "needs 2 blocks, 0 available of 4")


@pytest.mark.parametrize(
    "family, num_blocks, length, tokens",
    [
        ("gemma3_text", 20, 30, 14),  # fits into the pool of the sliding layers, which is written first
        ("gemma3_text", 20, 5, 60),
        ("mistral", 16, 30, 60),
    ],
)
def test_a_forward_that_ends_in_an_exhausted_pool_leaves_every_layer_as_it_was(family, num_blocks, length, tokens):
    pair = Pair(family, block_size=4, num_blocks=num_blocks)
    pair.update(length)
    for _ in range(2):
        pair.refuse(tokens, "needs .* available of")
    pair.update(9)
    pair.check()


def test_copy_on_write_in_an_exhausted_pool_raises_and_leaves_the_fork_alone():
    pair = Pair("llama", num_blocks=2)
    pair.update(5)
    fork = pair.fork()
    pair.refuse(1, "needs . blocks?, 0 available of 2")
    fork.check()
    del fork
    pair.update(1)
    pair.check()


def test_rows_that_part_in_a_later_layer_of_an_exhausted_pool():
    cache = PagedCache(config_of("llama"), {"block_size": 4, "num_blocks": 5})
    cache.expect(shared_rows=4)
    key, value = random_kv(1, 6)
    shared = key.expand(4, -1, -1, -1), value.expand(4, -1, -1, -1)
    for _ in range(2):
        cache.update(*shared, 0)
        with pytest.raises(RuntimeError, match="needs . blocks, . available of 5"):
            cache.update(*random_kv(4, 6), 1)
        assert [cache.get_seq_length(index) for index in range(LAYERS)] == [0, 0, 0]
        assert cache.stats().blocks_used == 0
        cache.check_integrity()
    for index in range(LAYERS):
        cache.update(*shared, index)
    assert torch.equal(cache.layers[2].keys, shared[0])


def test_a_refused_forward_does_not_forget_the_padding():
    """The second step fits into the pool of the sliding layers and not into that of the full one."""
    cache = PagedCache(config_of("gemma3_text"), {"block_size": 4, "num_blocks": 16})
    cache.expect((torch.arange(60)[None] >= torch.tensor([0, 40])[:, None]).long())
    feed(cache, 2, 30)
    with pytest.raises(RuntimeError, match="available of 16"):
        feed(cache, 2, 30)
    assert [cache.get_seq_length(index) for index in range(LAYERS)] == [30] * LAYERS
    feed(cache, 2, 12)
    for layer in cache.layers:
        assert not layer.keys[1, :, :-2].any() and layer.keys[1, :, -2:].all()


def test_a_reset_for_which_there_is_no_room_changes_nothing():
    """transformers 5.17 zeroes what a cache holds, which takes blocks of its own where forks share them."""
    pair = Pair("llama", num_blocks=2)
    pair.update(5)
    fork = pair.fork()
    try:
        pair.paged.reset()
    except RuntimeError:
        pair.check()
    fork.check()
    del fork
    pair.both("reset")
    pair.update(3)
    pair.check()
