"""Blocks that decoding rows take by themselves, before the block manager counts them.

Contract: only those that the pool would give next are offered, in its order and without evicting any. So counting
them later, in the order in which they were taken, gives the same blocks: the manager is then as if it had handed out
each at once. It must be settled before anything else asks the manager or its pool (`CacheGroup.manager` sees to that).
Handing out a block in the manager costs microseconds, most of them waiting for memory: many at once cost a fraction.
No torch in this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .block_manager import BlockManager

MOST = 256  # counting so many takes a third of a millisecond
FEWEST = 16


class BlocksAhead:
    """The blocks that one group of layers offers.

    Args:
        rows: what takes them: a GroupRows of hf_paged_kernels.
        most: how many are offered at most.

    Attributes:
        is_open: whether blocks are offered that the manager has not counted.
    """

    def __init__(self, rows: Any, most: int = MOST) -> None:
        self._rows, self._most = rows, most
        self._ids, self._takers = np.zeros(most, dtype=np.int32), np.zeros(most, dtype=np.int64)
        rows.point(next=self._ids, takers=self._takers)
        self._used = 0  # how many of the last offer were taken
        self.is_open = False

    def offer(self, manager: BlockManager, num_blocks: int) -> None:
        """Offer at least so many blocks, as far as they are free; what is offered already is settled.

        Twice as many as were taken the last time: where somebody asks the manager in every step, few are offered.
        """
        self.settle(manager)
        ids = manager.pool.upcoming(min(self._most, max(FEWEST, num_blocks, 2 * self._used)))
        self._ids[: len(ids)] = ids
        self.is_open = True
        self._rows.num_next = len(ids)

    def settle(self, manager: BlockManager) -> None:
        """Have the manager count what was taken, and offer nothing."""
        if not self.is_open:
            return
        taken = self._rows.num_taken
        keys, ids = self._takers[:taken].tolist(), self._ids[:taken].tolist()
        self._used = taken
        self.close()
        if taken:
            counted = manager.append_blocks(keys)
            assert counted == ids, f"rows took blocks {ids}, the pool gives {counted}"

    def close(self) -> None:
        """Offer nothing, and count nothing."""
        self.is_open, self._rows.num_next, self._rows.num_taken = False, 0, 0
