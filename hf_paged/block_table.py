"""One request's block table, and what must hold of all of them together.

Contract: plain data; `BlockManager` changes it. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from .block_pool import BlockPool

NULL_BLOCK = -1
"""Block table entry whose block was given back, because its tokens lie behind a sliding window."""


class BlockTable:
    """One request's block table. The NULL_BLOCK entries are always its first `num_null` ones."""

    __slots__ = ("blocks", "num_null", "num_tokens", "request_id")

    def __init__(self, request_id: Hashable, blocks: list[int], num_tokens: int, num_null: int = 0) -> None:
        self.request_id = request_id
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.num_null = num_null

    def __str__(self) -> str:
        null = f", the first {self.num_null} NULL_BLOCK" if self.num_null else ""
        return f"request {self.request_id!r} (num_tokens {self.num_tokens}, blocks {len(self.blocks)}{null})"


def check_tables(tables: Iterable[BlockTable], reverse_index: Mapping[int, set[Hashable]], pool: BlockPool) -> None:
    """Raise AssertionError, saying what is wrong, unless tables, reverse index and ref counts agree."""
    holders: dict[int, set[Hashable]] = {}
    for table in tables:
        held = table.blocks[table.num_null :]
        if len(table.blocks) != -(-table.num_tokens // pool.block_size):
            raise AssertionError(f"wrong table length for block_size {pool.block_size}: {table}")
        if NULL_BLOCK in held or table.blocks[: table.num_null] != [NULL_BLOCK] * table.num_null:
            raise AssertionError(f"NULL_BLOCK is in the wrong entries of {table}: {table.blocks}")
        if len(set(held)) != len(held):
            raise AssertionError(f"a block is twice in {table}: {table.blocks}")
        for block_id in held:
            holders.setdefault(block_id, set()).add(table.request_id)
    for block_id, ref_count in enumerate(pool.ref_counts):
        held_by = holders.get(block_id, set())
        if ref_count != len(held_by):
            raise AssertionError(f"block {block_id} has ref count {ref_count}, held by {held_by}")
    if holders != reverse_index:
        raise AssertionError(f"the reverse index is {reverse_index}, the tables say {holders}")
