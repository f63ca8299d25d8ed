"""Rows of a PagedCache share blocks: reordering, repeating, selecting and forking.

Contract: these operations move block tables and ref counts, never K/V. A block that several rows or forks hold is
copied once, by the one that writes into it, at its next write; what the others see does not change. Blocks that
nobody holds any more come back.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from cache_helpers import Pair, config_of, random_kv

import hf_paged_kernels as kernels
from hf_paged import PagedCache, kv_pages
from hf_paged.kv_pool import KVPool

LAYERS = 3  # of the llama config; all in one pool


@pytest.fixture
def copies(monkeypatch) -> list[tuple[int, int]]:
    """The (source, destination) block copies that pools are asked to make."""
    made: list[tuple[int, int]] = []
    copy_blocks = KVPool.copy_blocks

    def recording(self, pairs):
        made.extend(pairs)
        copy_blocks(self, pairs)

    monkeypatch.setattr(KVPool, "copy_blocks", recording)
    return made


def used(pair: Pair) -> int:
    return pair.paged.stats().blocks_used


def addresses(cache: PagedCache) -> list[int]:
    return [tensor.data_ptr() for tensor in cache.storages()]


# Permuting rows


@pytest.mark.parametrize(
    "name, argument, index, blocks",
    [
        ("reorder_cache", torch.tensor([2, 0, 1]), [2, 0, 1], 9),
        ("reorder_cache", torch.tensor([1, 1, 1]), [1, 1, 1], 3),
        ("reorder_cache", torch.tensor([0, 1, 2]), [0, 1, 2], 9),
        ("batch_repeat_interleave", 4, [0] * 4 + [1] * 4 + [2] * 4, 9),
        ("batch_select_indices", torch.tensor([2, 0]), [2, 0], 6),
        ("batch_select_indices", torch.tensor([-1, 0, 0, 1]), [2, 0, 0, 1], 9),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2], 6),
    ],
)
def test_permuting_rows_moves_no_keys_or_values(name, argument, index, blocks):
    pair = Pair("llama", batch=3)
    pair.update(33)
    before = addresses(pair.paged)
    kernels.reset_op_calls()
    pair.take_rows(name, argument, torch.tensor(index, dtype=torch.long))
    assert not any(kernels.op_calls().values())
    assert addresses(pair.paged) == before and used(pair) == blocks
    pair.check()
    for tokens in (1, 20):
        pair.update(tokens)
        pair.check()


def test_no_row_left():
    pair = Pair("llama")
    pair.update(5)
    pair.both("batch_select_indices", torch.tensor([], dtype=torch.long))
    assert pair.paged.layers[0].keys.shape == pair.dynamic.layers[0].keys.shape
    assert used(pair) == 0
    pair.paged.check_integrity()


@pytest.mark.parametrize("index", [[0, 0, 3], [-4, 0, 1], [-1, 0, 1]])
def test_reordering_by_rows_that_are_not_there_changes_nothing(index):
    pair = Pair("llama", batch=3)
    pair.update(5)
    for cache in (pair.dynamic, pair.paged):
        with pytest.raises(IndexError):
            cache.reorder_cache(torch.tensor(index))
    pair.check()
    assert used(pair) == 3
    pair.update(1)
    pair.both("reset")
    assert used(pair) == 3 * bool(pair.paged.get_seq_length())


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gemma3n_text", "deepseek_v3"])
def test_permuting_rows_of_every_pool(family):
    pair = Pair(family, batch=2, block_size=4)
    for tokens, index in [(11, [1, 1]), (1, [0, 1]), (3, [1, 0, 1]), (9, [2, 2, 0, 1])]:
        pair.update(tokens)
        pair.take_rows("batch_select_indices", torch.tensor(index), torch.tensor(index))
        pair.check()


def test_permuted_rows_take_their_padding_along():
    cache, (key, value) = PagedCache(config_of("llama"), {"block_size": 4}), random_kv(3, 8)
    real = torch.arange(8)[None] >= torch.tensor([0, 5, 3])[:, None]
    cache.expect(real.long())
    for index in range(LAYERS):
        cache.update(key, value, index)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 2, 1]))
    rows = [2, 1, 0, 1]
    expected = key.where(real[:, None, :, None], 0)[rows]
    assert torch.equal(cache.layers[0].keys, expected)
    new_key, new_value = random_kv(4, 3)
    held, _ = cache.update(new_key, new_value, 0)
    assert torch.equal(held + 0, torch.cat([expected, new_key], 2))
    cache.check_integrity()


# Copy-on-write


@pytest.mark.parametrize(
    "length, new_tokens, num_copies, blocks",
    [
        (33, 1, 3, 2 + 4),  # the block of one token parts; the last of its holders keeps it
        (33, 40, 3, 2 + 4 * 3),
        (32, 1, 0, 2 + 4),  # full blocks are never written
        (47, 2, 3, 2 + 4 * 2),
    ],
)
def test_only_a_partly_filled_block_is_copied_and_only_at_the_next_write(
    copies, length, new_tokens, num_copies, blocks
):
    pair = Pair("llama", batch=1)
    pair.update(length)
    pair.take_rows("batch_repeat_interleave", 4, torch.zeros(4, dtype=torch.long))
    assert used(pair) == -(-length // 16) and not copies
    kernels.reset_op_calls()
    pair.update(new_tokens)
    assert len(copies) == num_copies and used(pair) == blocks
    assert kernels.op_calls()["copy_blocks"] == (LAYERS if num_copies else 0)
    pair.update(1)
    assert len(copies) == num_copies  # parted for good
    pair.check()


def test_beams_of_a_long_prompt_cost_little_more_than_one():
    pair = Pair("llama", batch=1)
    pair.update(512)
    pair.take_rows("batch_repeat_interleave", 4, torch.zeros(4, dtype=torch.long))
    for step in range(32):
        pair.update(1)
        index = torch.tensor([[0, 0, 1, 2], [3, 1, 2, 0], [1, 1, 1, 1]][step % 3])
        pair.take_rows("reorder_cache", index, index)
    assert used(pair) < 1.3 * 34
    pair.check()


# Forks


@pytest.mark.parametrize("make", [copy.deepcopy, PagedCache.fork])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_next"])
def test_the_first_continuation_does_not_change_what_the_second_sees(family, make):
    pair = Pair(family, block_size=4)
    pair.update(10)
    twin = pair.fork()
    twin.paged = make(pair.paged)
    kernels.reset_op_calls()
    pair.update(3)
    twin.check()
    twin.update(9)
    pair.check()
    grandchild = twin.fork()
    twin.update(1)
    grandchild.update(2)
    for each in (pair, twin, grandchild):
        each.update(5)
        each.check()


def test_a_fork_costs_nothing_and_gives_back_what_it_took(copies):
    pair = Pair("llama", block_size=4)
    pair.update(10)
    forks = [pair.fork() for _ in range(5)]
    assert used(pair) == 6 and not copies
    stats = forks[0].paged.stats()
    assert stats.blocks_held == stats.blocks_used == 6
    forks[0].update(3)  # two rows, each: its last block copied, and one more
    assert used(pair) == 10 and len(copies) == 2
    assert forks[0].paged.stats().blocks_held == 8 and pair.paged.stats().blocks_held == 6
    del forks
    gc.collect()
    pair.paged.check_integrity()
    assert used(pair) == 6
    pair.update(1)
    assert len(copies) == 2  # the only holder writes in place
    pair.check()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32])
def test_crop_leaves_a_fork_that_shares_the_block_alone(length):
    pair = Pair("llama", block_size=16)
    pair.update(33)
    fork = pair.fork()
    pair.both("crop", length - 33)
    pair.update(5)
    fork.check()
    fork.update(5)
    pair.check()
    fork.check()


def test_a_dead_cache_leaves_no_storage_behind():
    pair = Pair("gemma3_text")
    pair.update(9)
    pair.fork().update(1)
    held = pair.paged.update(*random_kv(2, 0), 0)
    alive = [weakref.ref(tensor) for tensor in pair.paged.storages()]
    assert len(alive) == 2 * LAYERS
    fork = pair.fork()
    del pair, held
    fork.check()
    assert all(reference() is not None for reference in alive)
    del fork
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_forks_in_several_threads(monkeypatch):
    """They share one pool that grows under all of them, and blocks of forks that die are reused at once."""
    enlarged = kv_pages._enlarged

    def slowly_enlarged(*args):
        larger = enlarged(*args)
        time.sleep(1e-3)  # time for another thread to write where it would be lost
        return larger

    monkeypatch.setattr(kv_pages, "_enlarged", slowly_enlarged)
    original = Pair("gemma3_text", block_size=2)
    original.update(10)
    pairs, errors, barrier = [original.fork() for _ in range(3)], [], threading.Barrier(3)

    def work(pair: Pair) -> None:
        try:
            barrier.wait()
            for step in range(40):
                pair.update(1 + step % 3)
                if step % 5 == 0:
                    pair.fork().update(2)
                if step % 7 == 0:
                    pair.take_rows("reorder_cache", torch.tensor([1, 0]), torch.tensor([1, 0]))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    for pair in [original, *pairs]:
        pair.check()
