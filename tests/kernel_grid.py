"""The grid of attention problems that every backend is held to; `python tests/kernel_grid.py c CELL` runs one cell.

Contract: a `Cell` is one point of the grid and its name says all of it, random numbers included. `sample()` is a
list in which every pair of values of two axes occurs; `everything()` yields the whole product. `run_cell` raises
AssertionError with the cell and the command that runs it alone.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from allpairspy import AllPairs
from kernel_cases import Case, build, check

import hf_paged_kernels as kernels

AXES = {
    # one token of each sequence; the same over long ones; whole prompts; chunks after a past
    "call": ["decode", "long", "prompt", "chunk"],
    "head_dim": [8, 24, 64, 80, 96, 128, 256],
    "block_size": [1, 4, 16, 17, 64, 256],
    "kv_heads": [1, 2, 4],
    "group": [1, 3, 8],
    "dtype": ["float32", "bfloat16", "float16"],
    "features": [
        "none", "window", "softcap", "sinks", "starts", "dv", "lse", "window+softcap", "window+sinks+lse",
        "window+starts", "softcap+sinks", "starts+dv+lse", "window+softcap+sinks+starts+dv+lse",
    ],
}  # fmt: skip
HEAD_DIMS_V = [8, 12, 40, 96, 128, 256]


class Cell(NamedTuple):
    call: str
    head_dim: int
    block_size: int
    kv_heads: int
    group: int
    dtype: str
    features: str

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def parse(cls, name: str) -> Cell:
        values = [type(axis[0])(part) for axis, part in zip(AXES.values(), name.split("-"), strict=True)]
        for (axis, allowed), value in zip(AXES.items(), values, strict=True):
            if value not in allowed:
                raise ValueError(f"{axis}: expected one of {allowed}, got {value!r}")
        return cls(*values)


def sample() -> list[Cell]:
    """Cells among which each pair of values of any two axes occurs at least once."""
    return [Cell(*row) for row in AllPairs(list(AXES.values()))]


def everything(**fixed) -> Iterator[Cell]:
    """Every cell of the product, or those that have the values given."""
    axes = [[fixed[name]] if name in fixed else values for name, values in AXES.items()]
    return itertools.starmap(Cell, itertools.product(*axes))


def targets() -> list[tuple[str, str]]:
    """(backend, device) of everything that can run here; the variable BACKENDS="c triton" restricts it.

    On a machine with a GPU Triton runs there, elsewhere under its interpreter, where that is switched on.
    """
    wanted = os.environ.get("BACKENDS", "").replace(",", " ").split() or list(kernels.BACKENDS)
    unknown = set(wanted) - set(kernels.BACKENDS)
    if unknown:
        raise ValueError(f"BACKENDS: expected names of {sorted(kernels.BACKENDS)}, got {sorted(unknown)}")
    gpu, interpreted = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
    found = [(name, "cpu") for name in wanted if name != "triton" or (interpreted and not gpu)]
    return found + [(name, "cuda") for name in wanted if name != "c" and gpu]


def is_slow(backend: str, device: str) -> bool:
    """Triton on a CPU runs under its interpreter, about a millisecond for each operation of each program."""
    return backend == "triton" and device == "cpu"


def case_of(cell: Cell, device: str = "cpu", short: bool = False) -> Case:
    """The problem of a cell: ragged, with an empty sequence, on and across block borders; `short` for slow ones."""
    rng = random.Random(zlib.crc32(cell.name.encode()))
    features = set(cell.features.split("+"))
    lens, chunks = lengths(cell, rng, short)
    window = rng.choice([1, 5, cell.block_size, cell.block_size + 1, 2 * cell.block_size + 3])
    starts = [rng.choice([0, n // 2, rng.randint(0, n), n]) for n in lens]
    return build(
        lens,
        chunks,
        head_dim=cell.head_dim,
        head_dim_v=rng.choice([d for d in HEAD_DIMS_V if d != cell.head_dim]) if "dv" in features else None,
        block_size=cell.block_size,
        kv_heads=cell.kv_heads,
        group=cell.group,
        dtype=getattr(torch, cell.dtype),
        window=window if "window" in features else 0,
        softcap=1.5 if "softcap" in features else 0.0,
        sinks="sinks" in features,
        starts=starts if "starts" in features else None,
        lse="lse" in features,
        scale=cell.head_dim**-0.5 * rng.choice([1.0, 1.5]),
        seed=rng.randrange(2**32),
        device=device,
    )


def lengths(cell: Cell, rng: random.Random, short: bool) -> tuple[list[int], list[int] | None]:
    """Lengths of the sequences, and of their chunks for a prefill."""
    block = cell.block_size
    some = max(1, 16 // block) * block  # tokens of whole blocks, a few of them where they are small
    tail = rng.randint(1, min(block, 20)) if short else rng.randint(1, 2 * some)
    if cell.call == "long":
        # Enough to be split among workers, into parts of 128 tokens at least (Triton) and more in C.
        return [rng.randint(260, 450) if short else rng.randint(1000, 3000), 3], None
    lens = [rng.randint(1, min(some, 20)), 0, some, some + tail]
    if cell.call == "decode":
        return lens, None
    if cell.call == "prompt":
        lens = [lens[0], 0, min(some, 64) + min(tail, 40)] if short else [lens[0], 0, some + tail // 2]
        return lens, lens
    widest = 12 if short and cell.group == 8 else 40
    return lens, [rng.randint(1, lens[0]), 0, 0 if rng.random() < 0.5 else 1, rng.randint(2, min(lens[3], widest))]


def run_cell(cell: Cell, backend: str, device: str = "cpu") -> None:
    try:
        check(case_of(cell, device, is_slow(backend, device)), backend)
    except Exception as error:
        command = f"python tests/kernel_grid.py {backend} {cell.name} {device}"
        raise AssertionError(f"{backend} on {device}, cell {cell.name}: {error}\nto repeat: {command}") from error


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, as in conftest.py
    run_cell(Cell.parse(sys.argv[2]), sys.argv[1], *sys.argv[3:])
    print("within bounds")
