"""BlockManager by example: allocate, append and free; truncate and release; integrity."""

from __future__ import annotations

import pytest
from block_helpers import refuses, small_manager

from hf_paged.block_manager import NULL_BLOCK, BlockManager


@pytest.fixture
def manager() -> BlockManager:
    return small_manager()


def test_a_request_takes_and_gives_back_its_blocks():
    manager = BlockManager(100, 16)
    assert manager.allocate_request("a", 33) == [0, 1, 2]
    assert (manager.available_blocks, manager.used_blocks, manager.utilization) == (97, 3, 0.03)
    assert manager.free_request("a") == [0, 1, 2]
    assert (manager.available_blocks, manager.utilization, manager.num_requests) == (100, 0.0, 0)
    manager.check_integrity()


def test_appending_fills_the_last_block_first():
    manager = BlockManager(100, 16)
    manager.allocate_request("a", 16)
    assert manager.append_tokens("a", 17) == []
    assert manager.num_tokens("a") == 33
    assert len(manager.block_table("a")) == 3
    assert manager.available_blocks == 97


def test_blocks_come_back_when_the_last_holder_goes():
    manager = BlockManager(100, 16)
    manager.allocate_request("a", 64)
    manager.share_prefix("a", 2, "b")
    assert manager.available_blocks == 96
    assert manager.free_request("a") == [2, 3]
    assert manager.available_blocks == 98
    assert manager.free_request("b") == [0, 1]
    assert manager.available_blocks == 100
    manager.check_integrity()


def test_a_pool_too_small_changes_nothing():
    manager = BlockManager(3, 16)
    match = r"request 'a' \(num_tokens 65\) needs 5 blocks, 3 available of 3: .*num_blocks.*free requests"
    refuses(manager, RuntimeError, match, "allocate_request", "a", 65)
    assert "a" not in manager
    assert manager.allocate_request("a", 48) == [0, 1, 2]


def test_a_request_of_no_tokens_can_grow():
    manager = BlockManager(1, 2)
    assert manager.allocate_request("a", 0) == []
    assert "a" in manager and manager.num_tokens("a") == 0 and manager.available_blocks == 1
    assert manager.append_tokens("a") == []
    assert manager.block_table("a") == [0]
    manager.check_integrity()


def test_an_empty_pool():
    manager = BlockManager(0)
    assert (manager.utilization, manager.num_blocks, manager.block_size) == (0.0, 0, 16)
    assert manager.can_allocate(0) and not manager.can_allocate(1)
    refuses(manager, RuntimeError, "needs 1 block, 0 available of 0", "allocate_request", "a", 1)


@pytest.mark.parametrize("block_size", [1, 17])
def test_other_block_sizes(block_size):
    manager = BlockManager(6, block_size)
    manager.allocate_request("a", 2 * block_size)
    assert manager.append_tokens("a") == []
    assert len(manager.block_table("a")) == 3
    manager.fork("a", "b")
    copies = manager.append_tokens("b")  # a full last block is never written again: nothing to copy
    assert copies == ([] if block_size == 1 else [(2, 3)])
    assert manager.available_blocks == 2
    manager.truncate("b", block_size)
    assert manager.block_table("b") == [0]
    manager.check_integrity()


def test_any_hashable_is_a_request_id():
    manager = BlockManager(4, 4)
    for request_id in (("a", 1), 7, None, frozenset({1})):
        manager.allocate_request(request_id, 1)
    assert manager.requests() == [("a", 1), 7, None, frozenset({1})]
    with pytest.raises(TypeError):
        manager.allocate_request([], 1)
    manager.check_integrity()


def test_can_allocate_and_can_append(manager):
    assert manager.can_allocate(16) and not manager.can_allocate(17)
    assert manager.can_append("a") and manager.can_append("a", 2 + 16) and not manager.can_append("a", 2 + 17)
    assert manager.can_append("b", 16) and not manager.can_append("b", 17)
    assert manager.can_append_many([("a", 2 + 8), ("b", 8)])
    assert not manager.can_append_many([("a", 2 + 8), ("b", 9)])
    assert manager.blocks_needed_for_append([("a", 2 + 8), ("b", 9)]) == 5
    assert manager.blocks_needed_for_append([]) == 0
    match = r"request 'a' \(num_tokens 10, blocks 3\) and 1 more needs 5 blocks, 4 available of 8"
    refuses(manager, RuntimeError, match, "append_many", [("a", 2 + 8), ("b", 9)])
    assert manager.append_many([("a", 2 + 8), ("b", 8)]) == []
    assert manager.available_blocks == 0


def test_append_many_is_atomic(manager):
    refuses(manager, ValueError, "unknown request 'z'", "append_many", [("a", 1), ("z", 1)])
    refuses(manager, ValueError, "num_tokens .* got -1", "append_many", [("a", 1), ("b", -1)])
    refuses(manager, ValueError, "request 'a' is in 2 items", "append_many", [("a", 1), ("b", 1), ("a", 1)])
    assert manager.append_many([]) == []
    assert manager.append_many([("a", 0), ("b", 0)]) == []
    assert manager.num_tokens("a") == 10


def test_the_view_is_live_and_the_copy_is_not(manager):
    view, copy = manager.block_table_view("a"), manager.block_table("a")
    manager.append_tokens("a", 4)
    manager.release_leading("a", 1)
    assert view == manager.block_table("a") == [NULL_BLOCK, 1, 2, 4]
    assert copy == [0, 1, 2]
    assert manager.block_table_view("a") is view
    manager.allocate_request("c", 4).append(99)
    assert 99 not in manager.block_table("c")


def test_growing_lets_a_refused_request_in():
    manager = BlockManager(1, 4)
    refuses(manager, RuntimeError, "needs 2 blocks, 1 available of 1", "allocate_request", "a", 5)
    manager.grow(3)
    assert (manager.num_blocks, manager.available_blocks) == (4, 4)
    assert manager.allocate_request("a", 5) == [0, 1]
    assert manager.utilization == 0.5
    manager.check_integrity()


def test_truncate_gives_back_what_no_token_needs(manager):
    manager.fork("a", "c")
    manager.append_tokens("a", 4)  # copies block 2 to 4, then takes 5
    assert manager.block_table("a") == [0, 1, 4, 5]
    assert manager.truncate("a", 12) == [5]
    assert manager.truncate("a", 12) == []
    assert manager.truncate("a", 5) == [4]
    assert manager.block_table("a") == [0, 1] and manager.num_tokens("a") == 5
    assert manager.truncate("a", 0) == []  # "c" still holds both
    assert manager.block_table("a") == [] and manager.block_table("c") == [0, 1, 2]
    manager.check_integrity()


def test_truncate_refusals(manager):
    refuses(manager, ValueError, "truncate to 11 tokens, more than .*num_tokens 10", "truncate", "a", 11)
    manager.release_leading("a", 2)
    for num_tokens in (1, 5, 8):
        match = f"to {num_tokens} tokens, block {(num_tokens - 1) // 4} is gone .* first 2 NULL_BLOCK"
        refuses(manager, ValueError, match, "truncate", "a", num_tokens)
    assert manager.truncate("a", 9) == []
    assert manager.truncate("a", 0) == [2]
    assert manager.block_table("a") == []
    manager.append_tokens("a", 5)
    assert NULL_BLOCK not in manager.block_table("a")
    manager.check_integrity()


def test_release_leading(manager):
    manager.fork("a", "c")
    assert manager.release_leading("a", 1) == []  # "c" holds it
    assert manager.release_leading("c", 2) == [0]
    assert manager.release_leading("a", 2) == [1]
    assert manager.release_leading("a", 2) == manager.release_leading("a", 1) == []
    assert manager.block_table("a") == manager.block_table("c") == [NULL_BLOCK, NULL_BLOCK, 2]
    assert manager.num_tokens("a") == 10
    refuses(manager, ValueError, "release 3 leading blocks, .*num_tokens 10", "release_leading", "a", 3)
    manager.fork("a", "d")
    assert manager.block_table("d") == [NULL_BLOCK, NULL_BLOCK, 2] and manager.ref_count(2) == 3
    assert [manager.free_request(request_id) for request_id in "acd"] == [[], [], [2]]
    assert manager.available_blocks == 7
    manager.check_integrity()


def test_release_leading_may_take_the_whole_table(manager):
    assert manager.release_leading("b", 1) == [3]
    assert manager.append_tokens("b") == []
    assert manager.block_table("b") == [NULL_BLOCK, 3] and manager.num_tokens("b") == 5
    manager.check_integrity()


def test_release_leading_does_not_rescan(manager):
    class Watched(list):
        def __getitem__(self, index):
            assert index.start >= 2, "read entries that were NULL_BLOCK already"
            return super().__getitem__(index)

    manager.release_leading("a", 2)
    manager.append_tokens("a", 2)
    manager._requests["a"].blocks = Watched(manager.block_table("a"))
    assert manager.release_leading("a", 3) == [2]


def test_prepare_write(manager):
    manager.fork("a", "c")
    assert manager.prepare_write("c", 0, 0) == manager.prepare_write("c", 10, 0) == []
    assert manager.prepare_write("c", 3, 2) == [(0, 4), (1, 5)]
    assert manager.prepare_write("c", 3, 2) == manager.prepare_write("a", 0, 8) == []
    assert manager.block_table("c") == [4, 5, 2] and manager.num_tokens("c") == 10
    assert manager.prepare_write("c", 8, 2) == [(2, 6)]
    manager.check_integrity()


def test_prepare_write_refusals(manager):
    refuses(manager, ValueError, "tokens 8 up to 11, .*beyond .*num_tokens 10", "prepare_write", "a", 8, 3)
    refuses(manager, ValueError, "tokens 11 up to 11, .*beyond", "prepare_write", "a", 11, 0)
    manager.fork("a", "c")
    manager.append_tokens("b", 8)
    match = r"writing tokens 0 up to 10 of request 'c' .* needs 3 blocks, 2 available of 8"
    refuses(manager, RuntimeError, match, "prepare_write", "c", 0, 10)
    manager.release_leading("c", 1)
    refuses(manager, ValueError, "token 3, block 0 is gone .*NULL_BLOCK", "prepare_write", "c", 3, 2)
    assert manager.prepare_write("c", 4, 2) == [(1, 6)]


def _wrong_ref_count(manager):
    manager._pool.ref_counts[1] = 5


def _wrong_length(manager):
    manager._requests["a"].num_tokens = 13


def _block_twice(manager):
    manager._requests["a"].blocks[1] = 0


def _null_in_the_middle(manager):
    manager._requests["a"].blocks[1] = NULL_BLOCK


def _null_not_written(manager):
    manager._requests["a"].num_null = 1


def _reverse_index(manager):
    manager._holders[1].add("b")


def _stale_holder(manager):
    manager._holders[7] = set()


def _held_and_free(manager):
    manager._pool._freed.append(1)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_wrong_ref_count, "block 1 has ref count 5"),
        (_wrong_length, r"wrong table length .*\(num_tokens 13, blocks 3\)"),
        (_block_twice, r"twice .*\[0, 0, 2\]"),
        (_null_in_the_middle, r"NULL_BLOCK .*\[0, -1, 2\]"),
        (_null_not_written, r"NULL_BLOCK .*\[0, 1, 2\]"),
        (_reverse_index, "reverse index"),
        (_stale_holder, "reverse index"),
        (_held_and_free, "block 1 has ref count 1, and free is True"),
    ],
)
def test_integrity_finds_damage(manager, damage, match):
    manager.check_integrity()
    damage(manager)
    with pytest.raises(AssertionError, match=match):
        manager.check_integrity()
