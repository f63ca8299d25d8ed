"""What the tests of the block manager share: its visible state, and a check that a refusal changes nothing."""

from __future__ import annotations

import pytest

from hf_paged.block_manager import BlockManager

NOT_COUNTS = [-1, True, 1.5, "1", None]


def state(manager: BlockManager) -> dict:
    """All that a caller can see of a manager."""
    return {
        "requests": [(r, manager.num_tokens(r), manager.block_table(r)) for r in manager.requests()],
        "blocks": [(manager.ref_count(b), manager.requests_of(b)) for b in range(manager.num_blocks)],
        "sizes": (manager.num_blocks, manager.available_blocks, manager.used_blocks, manager.num_requests),
    }


def refuses(manager: BlockManager, error: type[Exception], match: str, operation: str, *args) -> None:
    """Check that the operation raises, says why, and changes nothing."""
    before = state(manager)
    with pytest.raises(error, match=match):
        getattr(manager, operation)(*args)
    assert state(manager) == before
    manager.check_integrity()


def small_manager() -> BlockManager:
    """Eight blocks of 4 tokens; "a" has 10 tokens (4 + 4 + 2) in 3 of them, "b" has 4 in one."""
    manager = BlockManager(8, block_size=4)
    manager.allocate_request("a", 10)
    manager.allocate_request("b", 4)
    return manager
