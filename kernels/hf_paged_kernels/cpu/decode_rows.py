"""What a step of decoding changes in the rows of a batch, done in C: microseconds where numpy takes tens of them.

Contract: a `DecodeRows` reads and writes numpy arrays that its owner keeps and that `bind` names; the first rows take
part, as many as `set_count` was given. `reserve` gives each row whose block is full the next of the blocks that its
group may take; `advance` counts a token more in each row. Both hold Python's lock, so that no other thread sees half of
it, and neither can be interrupted. There are none without the C library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from . import load

MAX_GROUPS = 63  # bits of `unserved`


class _Fields(ctypes.Structure):
    def point(self, **arrays: Any) -> None:
        """Set fields to where numpy arrays begin, which are contiguous."""
        for name, array in arrays.items():
            assert array.flags.c_contiguous and array.dtype == _DTYPES.get(name, "int64"), name
            setattr(self, name, array.ctypes.data)


_DTYPES = {"seq_lens": "int32", "tables": "int32", "next": "int32", "dirty": "bool"}


def _fields(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class GroupRows(_Fields):
    """One group of layers, the struct Group of decode_rows.c. `rows` is the largest number of rows.

    slots     [rows] int64: where the next token of a row goes
    covered   [rows] int64: tokens that a row has blocks for
    tables    [rows, columns] int32: block tables
    dirty     [rows] bool: set where a row's table changes
    next      [num_next] int32: the blocks that may be taken, in this order
    takers    [num_next] int64: which row took each of the first `num_taken`, by its key
    """

    _fields_ = _fields("slots covered tables dirty columns next takers num_next num_taken")


class _Rows(_Fields):
    _fields_ = _fields(
        "num_computed num_tokens last_token max_tokens keys seq_lens eos recent ended groups "
        "num_groups rows eos_columns block_size count unserved"
    )


@cache
def _entries():
    """The two C functions, called with Python's lock held; None without the library."""
    library, _ = load()
    if library is None:
        return None
    locked = ctypes.PyDLL(library._name)
    reserve, advance = locked.hf_paged_reserve, locked.hf_paged_advance
    reserve.argtypes, advance.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    reserve.restype = advance.restype = ctypes.c_int64
    return reserve, advance


class DecodeRows:
    """The rows of one batch.

    Args:
        num_groups: groups of layers, up to MAX_GROUPS.
        block_size: tokens in a block.

    Attributes:
        groups: a GroupRows for each group; nothing may be taken until its `num_next` says so.
        reserve: gives each row that takes part a block for its next token, and returns the largest length with that
            token; -1 where `unserved` tells of groups.
        advance: counts a token more in each row that takes part, and returns how many rows `ended` lists. Takes the
            address of the tokens, an int64 for each row, and the row of `recent` that notes them.
    """

    @staticmethod
    def available(num_groups: int) -> bool:
        """Whether they can be made here, for so many groups."""
        return num_groups <= MAX_GROUPS and _entries() is not None

    def __init__(self, num_groups: int, block_size: int) -> None:
        groups = (GroupRows * num_groups)()
        self.groups: Sequence[GroupRows] = list(groups)  # which keep the array alive
        self._rows = _Rows(groups=ctypes.addressof(groups), num_groups=num_groups, block_size=block_size)
        reserve, advance = _entries()
        # Right after a forward each frame and each field of a struct costs microseconds: these are called without any.
        self.reserve: Callable[[], int] = partial(reserve, ctypes.addressof(self._rows))
        self.advance: Callable[[int, int], int] = partial(advance, ctypes.addressof(self._rows))

    def bind(self, **arrays: Any) -> None:
        """Say where the arrays are that belong to no group, again whenever one is replaced.

        num_computed, num_tokens, last_token, max_tokens, keys  [rows] int64
        seq_lens  [rows] int32
        eos       [rows, columns] int64: tokens that end a row
        recent    [steps, rows] int64: where each step leaves the newest tokens
        ended     [rows] int64: which rows ended
        """
        rows = self._rows
        rows.point(**arrays)
        rows.rows, rows.eos_columns = arrays["eos"].shape

    def set_count(self, count: int) -> None:
        """Have the first `count` rows take part."""
        self._rows.count = count

    @property
    def unserved(self) -> int:
        """A bit for each group that `reserve` could not serve, which is as it was."""
        return self._rows.unserved
