"""BlockManager: sharing, copy-on-write, and every refusal by its text."""

from __future__ import annotations

import pytest
from block_helpers import NOT_COUNTS, refuses, small_manager

from hf_paged.block_manager import NULL_BLOCK, BlockManager


@pytest.fixture
def manager() -> BlockManager:
    return small_manager()


def test_a_fork_copies_only_the_half_full_block_and_only_when_written(manager):
    manager.fork("a", "c")
    assert manager.block_table("c") == manager.block_table("a") == [0, 1, 2]
    assert manager.num_tokens("c") == 10 and manager.available_blocks == 4
    assert [manager.ref_count(b) for b in (0, 1, 2, 3)] == [2, 2, 2, 1]
    assert manager.requests_of(2) == {"a", "c"} and manager.requests_of(3) == {"b"}
    assert manager.append_tokens("c") == [(2, 4)]
    assert manager.block_table("c") == [0, 1, 4]
    assert manager.requests_of(2) == {"a"} and manager.requests_of(4) == {"c"}
    assert manager.append_tokens("a") == []  # the last holder writes in place
    assert manager.requests_of(7) == frozenset()
    manager.check_integrity()


def test_a_copy_and_new_blocks_in_one_append(manager):
    manager.fork("a", "c")
    assert manager.blocks_needed_for_append([("c", 7)]) == 3
    assert manager.append_tokens("c", 7) == [(2, 4)]
    assert manager.block_table("c") == [0, 1, 4, 5, 6]
    manager.check_integrity()


def test_a_full_shared_block_is_copied_after_truncate_to_its_middle(manager):
    manager.share_prefix("a", 2, "c")
    assert manager.append_tokens("c") == []  # behind the shared blocks: nothing to copy
    assert manager.truncate("c", 6) == [4]
    assert manager.append_tokens("c") == [(1, 4)]
    assert manager.block_table("c") == [0, 4]
    manager.check_integrity()


def test_two_holders_and_one_free_block():
    manager = BlockManager(2, 4)
    manager.allocate_request("a", 2)
    manager.fork("a", "b")
    assert manager.blocks_needed_for_append([("a", 1), ("b", 1)]) == 1
    assert manager.append_many([("a", 1), ("b", 1)]) == [(0, 1)]
    assert (manager.block_table("a"), manager.block_table("b")) == ([1], [0])
    manager.check_integrity()


@pytest.mark.parametrize("free_blocks", [0, 2, 3, 4])
@pytest.mark.parametrize("num_writers", [1, 2, 3, 4, 5])
def test_append_many_needs_exactly_what_it_takes(free_blocks, num_writers):
    manager = BlockManager(1 + free_blocks, 4)
    manager.allocate_request(0, 2)
    for request_id in range(1, 5):
        manager.fork(0, request_id)
    items = [(request_id, 1) for request_id in range(num_writers)]
    need = min(num_writers, 4)
    assert manager.blocks_needed_for_append(items) == need
    assert manager.can_append_many(items) is (need <= free_blocks)
    if need > free_blocks:
        match = f"needs {need} blocks?, {free_blocks} available of {1 + free_blocks}"
        refuses(manager, RuntimeError, match, "append_many", items)
    else:
        assert manager.append_many(items) == [(0, 1 + i) for i in range(need)]
        assert manager.available_blocks == free_blocks - need
        assert manager.ref_count(0) == 5 - need
    manager.check_integrity()


def test_append_tokens_without_a_block_for_the_copy_changes_nothing():
    manager = BlockManager(1, 4)
    manager.allocate_request("a", 2)
    manager.fork("a", "b")
    assert not manager.can_append("b") and manager.can_append("b", 0)
    refuses(manager, RuntimeError, "request 'b' .* needs 1 block, 0 available of 1", "append_tokens", "b")


def test_share_prefix_refusals(manager):
    refuses(manager, ValueError, r"share 4 blocks, more than .* blocks 3", "share_prefix", "a", 4, "c")
    refuses(manager, ValueError, "share 3 .*not full .*num_tokens 10.*fork", "share_prefix", "a", 3, "c")
    refuses(manager, ValueError, r"already a request 'b' \(num_tokens 4", "share_prefix", "a", 1, "b")
    refuses(manager, ValueError, "already a request 'a'", "share_prefix", "a", 1, "a")
    manager.release_leading("a", 1)
    refuses(manager, ValueError, r"share 2 blocks, .*NULL_BLOCK", "share_prefix", "a", 2, "c")
    manager.share_prefix("a", 0, "c")
    assert manager.block_table("c") == [] and manager.num_tokens("c") == 0
    manager.check_integrity()


def test_fork_and_allocate_refuse_a_request_that_exists(manager):
    match = r"already a request 'b' \(num_tokens 4, blocks 1\)"
    refuses(manager, ValueError, match, "fork", "a", "b")
    refuses(manager, ValueError, match, "allocate_request", "b", 1)


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("append_tokens", ("z",)),
        ("append_many", ([("z", 1)],)),
        ("free_request", ("z",)),
        ("share_prefix", ("z", 1, "c")),
        ("fork", ("z", "c")),
        ("truncate", ("z", 0)),
        ("release_leading", ("z", 0)),
        ("prepare_write", ("z", 0, 0)),
        ("can_append", ("z",)),
        ("can_append_many", ([("z", 1)],)),
        ("blocks_needed_for_append", ([("z", 1)],)),
        ("block_table", ("z",)),
        ("block_table_view", ("z",)),
        ("num_tokens", ("z",)),
    ],
)
def test_an_unknown_request_is_refused(manager, operation, args):
    refuses(manager, ValueError, "unknown request 'z', none of the 2 held here", operation, *args)


@pytest.mark.parametrize("value", NOT_COUNTS)
@pytest.mark.parametrize(
    ("operation", "before", "after", "name"),
    [
        ("allocate_request", ("c",), (), "num_tokens"),
        ("append_tokens", ("a",), (), "num_tokens"),
        ("share_prefix", ("a",), ("c",), "num_blocks"),
        ("truncate", ("a",), (), "num_tokens"),
        ("release_leading", ("a",), (), "num_blocks"),
        ("prepare_write", ("a",), (1,), "first_token"),
        ("prepare_write", ("a", 1), (), "num_tokens"),
        ("can_allocate", (), (), "num_tokens"),
        ("can_append", ("a",), (), "num_tokens"),
    ],
)
def test_a_wrong_count_is_refused(manager, operation, before, after, name, value):
    match = f"{name} must be an integer of at least 0, got {value!r}"
    refuses(manager, ValueError, match, operation, *before, value, *after)


@pytest.mark.parametrize("operation", ["ref_count", "requests_of"])
@pytest.mark.parametrize("block_id", [NULL_BLOCK, 8, False])
def test_a_block_id_out_of_range_is_refused(manager, operation, block_id):
    match = f"block_id {block_id} is out of range for a pool of 8 blocks"
    refuses(manager, ValueError, match, operation, block_id)
