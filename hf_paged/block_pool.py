"""The physical blocks of a KV pool: a ref count each, which are free, and which of those still hold something.

Contract: every operation on one block is O(1); a block is a number, and whoever owns the tensors keeps one place
for each. Nothing here locks: one thread at a time. No torch in this file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


def check_count(name: str, value: int, minimum: int = 0) -> None:
    """Raise ValueError unless `value` is an int (no bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")


class BlockPool:
    """The physical blocks: a ref count each, and which are free. Every operation on one block is O(1).

    The block freed last is allocated first, a never used one only when no freed one is left. So ids stay
    below the largest number of blocks ever held at once, and storage that grows on demand stays compact.

    A block that `keep` marked is cached when it is free: `acquire` has it back as it was. When nothing else is left
    cached blocks are evicted, the one that was freed first before the others.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Make `num_blocks` (0 or more) free blocks of `block_size` (1 or more) tokens; else ValueError."""
        check_count("num_blocks", num_blocks)
        check_count("block_size", block_size, minimum=1)
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # by block id; read-only for others, who may index it in hot paths
        self._freed: list[int] = []  # blocks used before and free now, the last freed at the end
        self._first_unused = 0  # blocks from here upward were never allocated
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # kept and free, the least recently used first
        self.on_evict: Callable[[int], None] = _nothing  # told of each block that loses what it was kept for

    @property
    def num_blocks(self) -> int:
        """All blocks, held and free."""
        return len(self.ref_counts)

    @property
    def available_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return len(self._freed) + len(self._cached) + len(self.ref_counts) - self._first_unused

    @property
    def cached_blocks(self) -> int:
        """Free blocks that `acquire` can have back as they were."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Return how many holders the block has, 0 for a free one. ValueError when there is no such block."""
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id {block_id!r} is out of range for a pool of {self.num_blocks} blocks")
        return self.ref_counts[block_id]

    def allocate(self) -> int:
        """Take a free block and return its id; its ref count is then 1. RuntimeError when none is free."""
        if self._freed:
            block_id = self._freed.pop()
        elif self._first_unused < len(self.ref_counts):
            block_id = self._first_unused
            self._first_unused += 1
        else:
            self.require(1, "allocating a block")
            block_id = self._evict()
        self.ref_counts[block_id] = 1
        return block_id

    def allocate_many(self, count: int) -> list[int]:
        """Take several free blocks, in the order in which `allocate` would. RuntimeError, and nothing, if too few."""
        self.require(count, "allocating blocks")
        block_ids = self.upcoming(count)
        num_reused = min(count, len(self._freed))
        if num_reused:
            del self._freed[-num_reused:]
        self._first_unused += len(block_ids) - num_reused
        while len(block_ids) < count:
            block_ids.append(self._evict())
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def upcoming(self, count: int) -> list[int]:
        """The next blocks, at most `count`, that `allocate` would return before it evicts any; nothing is taken."""
        reused = self._freed[: -count - 1 : -1]
        last = min(self._first_unused + count - len(reused), len(self.ref_counts))
        return [*reused, *range(self._first_unused, last)]

    def acquire(self, block_id: int) -> None:
        """Add a holder to a held or cached block. ValueError for a free block or one that does not exist."""
        if self.ref_count(block_id) == 0:
            if block_id not in self._cached:
                raise ValueError(f"cannot acquire block_id {block_id}: it is free, its ref count is 0")
            del self._cached[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> bool:
        """Take a holder from a block; return True when that was the last one, and the block is free now.

        ValueError for a block that is free already or does not exist.
        """
        remaining = self.ref_count(block_id) - 1
        if remaining < 0:
            raise ValueError(f"cannot release block_id {block_id}: it is free, its ref count is 0")
        self.ref_counts[block_id] = remaining
        if remaining == 0:
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._freed.append(block_id)
        return remaining == 0

    def keep(self, block_id: int) -> None:
        """Have a held block cached when it is free. ValueError for a free block or one that does not exist."""
        if self.ref_count(block_id) == 0:
            raise ValueError(f"cannot keep block_id {block_id}: it is free, its ref count is 0")
        self._kept.add(block_id)

    def drop(self, block_id: int) -> None:
        """Undo `keep`, if it was called; a cached block is just free then. `on_evict` is not told."""
        self._kept.discard(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._freed.append(block_id)

    def kept_blocks(self) -> set[int]:
        """Blocks that `keep` marked, held or cached."""
        return set(self._kept)

    def touch(self, block_id: int) -> None:
        """Have a block that is cached evicted after all others."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._kept.remove(block_id)
        self.on_evict(block_id)
        return block_id

    def grow(self, num_new_blocks: int) -> None:
        """Add free blocks, with ids from the present `num_blocks` upward. ValueError if negative."""
        check_count("num_new_blocks", num_new_blocks)
        self.ref_counts.extend([0] * num_new_blocks)

    def require(self, num_blocks: int, what: str) -> None:
        """Raise RuntimeError, in the name of `what`, unless `num_blocks` blocks are free."""
        if num_blocks > self.available_blocks:
            need = f"{num_blocks} block" if num_blocks == 1 else f"{num_blocks} blocks"
            raise RuntimeError(
                f"{what} needs {need}, {self.available_blocks} available of {self.num_blocks}: "
                "give the pool a larger num_blocks, or free requests first"
            )

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless free list and ref counts agree."""
        freed = set(self._freed)
        if len(freed) != len(self._freed):
            raise AssertionError(f"the free list names a block twice: {self._freed}")
        for block_id, ref_count in enumerate(self.ref_counts):
            is_free = block_id in freed or block_id in self._cached or block_id >= self._first_unused
            if ref_count < 0 or is_free != (ref_count == 0):
                raise AssertionError(f"block {block_id} has ref count {ref_count}, and free is {is_free}")
        twice = freed & self._cached.keys()
        if twice or not self._cached.keys() <= self._kept or freed & self._kept:
            raise AssertionError(f"cached {list(self._cached)}, free {self._freed}, kept {sorted(self._kept)}")
        held = sum(ref_count > 0 for ref_count in self.ref_counts)
        if self.available_blocks + held != self.num_blocks:
            raise AssertionError(f"{self.available_blocks} free + {held} held blocks, not {self.num_blocks}")


def _nothing(block_id: int) -> None:
    """The `on_evict` of a pool that nobody caches in."""
