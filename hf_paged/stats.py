"""What a cache holds, in numbers.

Contract: plain immutable figures, read from the pools when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Blocks and bytes of a cache, summed over its pools (one pool a group of layers with one shape).

    Attributes:
        blocks_total: blocks that the pools have.
        blocks_used: blocks that somebody holds, this cache or one forked from it.
        blocks_held: blocks that this cache holds, a shared one counted once.
        bytes_total: bytes of the K/V tensors.
        bytes_held: bytes of the blocks that this cache holds.
        bytes_of_tokens: bytes of the tokens in those blocks.
        num_layers: layers that own K/V in blocks.
    """

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_held: int = 0
    bytes_total: int = 0
    bytes_held: int = 0
    bytes_of_tokens: int = 0
    num_layers: int = 0

    @property
    def utilization(self) -> float:
        """Share of the pools' blocks that somebody holds, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    @property
    def waste(self) -> float:
        """Share of the held blocks' bytes that hold no token, 0 to 1."""
        return 1 - self.bytes_of_tokens / self.bytes_held if self.bytes_held else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple:
        return tuple(vars(self).values())

    @classmethod
    def of(cls, pool, rows) -> CacheStats:
        """Figures of one pool and of the rows (or None) that a cache has in it."""
        manager = pool.manager
        storages = list(pool.storages())
        num_layers = len(storages) // 2
        held = len(rows.held_blocks()) if rows is not None else 0
        tokens = rows.stored_tokens() if rows is not None else 0
        layer_bytes = pool.block_bytes * num_layers
        return cls(
            blocks_total=manager.num_blocks,
            blocks_used=manager.num_blocks - manager.available_blocks,
            blocks_held=held,
            bytes_total=sum(tensor.untyped_storage().nbytes() for tensor in storages),
            bytes_held=held * layer_bytes,
            bytes_of_tokens=tokens * layer_bytes // pool.block_size,
            num_layers=num_layers,
        )
