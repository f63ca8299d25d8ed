"""Layers that share block tables, over the block manager that hands out their blocks.

Contract: says how many blocks there are, can be, and a request needs. Where rows take blocks by themselves (see
`BlocksAhead`), whoever asks for the manager gets it with those counted. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Callable

from .block_manager import BlockManager
from .blocks_ahead import BlocksAhead


class CacheGroup:
    """Layers that share block tables.

    Args:
        manager: hands out their blocks.
        sliding_window: tokens that a query of theirs sees, itself included; 0 for all.
        max_blocks: how many blocks there can be; None for those that the manager has.
        grow: makes at least so many blocks free, raising RuntimeError where it cannot; None for a fixed pool.

    Attributes:
        ahead: the blocks that rows take by themselves; None where they do not.
    """

    def __init__(
        self,
        manager: BlockManager,
        sliding_window: int = 0,
        max_blocks: int | None = None,
        grow: Callable[[int], None] | None = None,
    ) -> None:
        self._manager, self.sliding_window, self._grow = manager, sliding_window, grow
        self.ahead: BlocksAhead | None = None
        self.max_blocks = manager.num_blocks if max_blocks is None else max_blocks
        self._most_held, self._spares = 0, True

    @property
    def manager(self) -> BlockManager:
        """What hands out the blocks. Ask for it anew each time: no row takes a block by itself until the next step."""
        self.settle()
        return self._manager

    def settle(self) -> None:
        """Have the manager count the blocks that rows took by themselves."""
        if self.ahead is not None:
            self.ahead.settle(self._manager)

    def offer(self, num_blocks: int) -> None:
        """Let rows take so many blocks by themselves or more, as far as they are free, until the manager is asked for.

        Blocks behind a window are given back in the same step, which is the manager's.
        """
        if self.ahead is not None and not self.sliding_window:
            self.ahead.offer(self._manager, num_blocks)

    def reset(self) -> None:
        """Forget every request and have all blocks free, also after an operation that was cut off half-way."""
        if self.ahead is not None:
            self.ahead.close()
        self._manager.reset()

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or can be made."""
        manager = self.manager
        return manager.available_blocks + max(0, self.max_blocks - manager.num_blocks)

    def ensure(self, num_blocks: int) -> bool:
        """Have so many free blocks; False where that cannot be.

        A pool that can grow does so before it gives up cached blocks, as long as they are fewer than were ever held
        at once: so it is at most twice as large as what runs needs, and what is used again and again stays.
        """
        manager = self.manager
        cached = manager.pool.cached_blocks
        if num_blocks <= manager.available_blocks - cached:
            return True
        if self._spares and self._grow is not None:
            self._most_held = max(self._most_held, manager.used_blocks + num_blocks)
            wanted = num_blocks + min(cached, self._most_held)
            try:
                if wanted <= self.available_blocks:
                    self._grow(wanted)
            except RuntimeError:
                self._spares = False
        if num_blocks <= manager.available_blocks:
            return True
        if self._grow is None or num_blocks > self.available_blocks:
            return False
        try:
            self._grow(num_blocks)
        except RuntimeError:  # less memory than there was: what is there is what there can be
            self.max_blocks = manager.num_blocks
            return False
        return True

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Most blocks that a request holds while it grows to `num_tokens`, computed in chunks of at most `chunk`."""
        size = self._manager.block_size
        blocks = -(-num_tokens // size)
        if not self.sliding_window:
            return blocks
        seen = self.sliding_window - 1 + chunk  # tokens that a chunk's queries see, themselves included
        return min(blocks, (seen + size - 2) // size + 1)

    def first_block_seen(self, num_computed: int) -> int:
        """Index of the first block that the token behind `num_computed` others, or a later one, sees."""
        if not self.sliding_window:
            return 0
        return max(0, num_computed - self.sliding_window + 1) // self._manager.block_size
