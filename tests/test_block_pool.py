"""BlockPool: ref counts, order of reuse, refusals."""

from __future__ import annotations

import pytest
from block_helpers import NOT_COUNTS, small_manager

from hf_paged.block_manager import BlockManager
from hf_paged.block_pool import BlockPool


@pytest.fixture
def manager() -> BlockManager:
    return small_manager()


def test_pool_counts_holders():
    pool = BlockPool(2, block_size=4)
    block_id = pool.allocate()
    pool.acquire(block_id)
    assert (pool.ref_count(block_id), pool.available_blocks) == (2, 1)
    assert pool.release(block_id) is False
    assert pool.available_blocks == 1
    assert pool.release(block_id) is True
    assert (pool.ref_count(block_id), pool.available_blocks) == (0, 2)
    pool.check_integrity()


def test_pool_reuses_the_block_freed_last_before_a_new_one():
    pool = BlockPool(10)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    for block_id in (1, 2):
        pool.release(block_id)
    pool.grow(5)
    assert [pool.allocate() for _ in range(3)] == [2, 1, 4]
    pool.check_integrity()


def test_pool_grows_from_empty():
    pool = BlockPool(0, block_size=1)
    with pytest.raises(RuntimeError, match="needs 1 block, 0 available of 0: .*num_blocks"):
        pool.allocate()
    pool.grow(2)
    assert (pool.num_blocks, pool.available_blocks) == (2, 2)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    with pytest.raises(RuntimeError, match="needs 1 block, 0 available of 2"):
        pool.allocate()
    pool.check_integrity()


@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_pool_refuses_a_free_block(operation):
    pool = BlockPool(3)
    with pytest.raises(ValueError, match=f"cannot {operation} block_id 1: .*ref count is 0"):
        getattr(pool, operation)(1)
    pool.check_integrity()


@pytest.mark.parametrize("operation", ["acquire", "release", "ref_count"])
@pytest.mark.parametrize("block_id", [-1, 3, True, 1.0, None])
def test_pool_refuses_a_block_id_out_of_range(operation, block_id):
    with pytest.raises(ValueError, match=f"block_id {block_id} is out of range for a pool of 3 blocks"):
        getattr(BlockPool(3), operation)(block_id)


@pytest.mark.parametrize("make", [BlockPool, BlockManager])
def test_sizes_are_checked(make):
    for value in NOT_COUNTS:
        with pytest.raises(ValueError, match=f"num_blocks must be an integer of at least 0, got {value!r}"):
            make(value)
        with pytest.raises(ValueError, match=f"num_new_blocks must be .* at least 0, got {value!r}"):
            make(1).grow(value)
    for value in [0, *NOT_COUNTS]:
        with pytest.raises(ValueError, match=f"block_size must be an integer of at least 1, got {value!r}"):
            make(1, value)


def test_pool_integrity_finds_damage():
    pool = BlockPool(4)
    block_id = pool.allocate()
    pool.ref_counts[block_id] = 0
    with pytest.raises(AssertionError, match="block 0 has ref count 0"):
        pool.check_integrity()
    pool.ref_counts[block_id] = 1
    pool.release(block_id)
    pool._freed.append(block_id)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()
    pool._freed.clear()
    pool._first_unused = 0
    pool.ref_counts[3] = 1
    with pytest.raises(AssertionError, match="block 3 has ref count 1"):
        pool.check_integrity()
