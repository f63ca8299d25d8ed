"""Which compiled form of a kernel serves a call, and the list of all that can.

Contract: dispatch takes every `Variant` from the functions here, and `variants(arch)` calls them over all of their
inputs, so what runs is in the list by construction. Tile sizes, warps and pipeline stages come from
configs/<arch>.json, or default.json where an architecture has none; both hold, for `attend_kernel`:

    narrow     up to BLOCK_M query rows a sequence and KV head: decode, and short chunks
    wide       more rows: prefill, and decode with very many heads a group
    unaligned  either, where rows do not start at multiples of 16 bytes (head sizes such as 12): slow, but right

by dtype and padded head size, and for each of the other kernels one entry.
"""

import functools
import json
from pathlib import Path

from .runtime import TYPES, Variant

CONFIGS = Path(__file__).parent.parent / "configs"
HEAD_PADS = (64, 128, 256)
MAX_HEAD_DIM = HEAD_PADS[-1]
DTYPES = tuple(TYPES.values())
VEC_BYTES = 16


@functools.cache
def config(arch: str) -> dict:
    """The parsed configuration file of an architecture."""
    path = CONFIGS / f"{arch}.json"
    return json.loads((path if path.exists() else CONFIGS / "default.json").read_text())


@functools.cache
def attend(arch: str, dtype: str, head_dim: int, aligned: bool, num_rows: int) -> Variant:
    """For the larger of two head sizes, and num_rows query rows of a sequence and KV head, or more than there are.

    aligned: rows of K, V, query and out start and end at multiples of 16 bytes.
    """
    tiles = config(arch)["attend"]
    head_pad = head_pad_of(head_dim) if aligned else MAX_HEAD_DIM
    shape = "narrow" if aligned else "unaligned"
    if aligned and num_rows > tiles["narrow"][dtype][str(head_pad)]["BLOCK_M"]:
        shape = "wide"
    vec = VEC_BYTES // (4 if dtype == "fp32" else 2) if aligned else 1
    return _variant("attend_kernel", dtype, {"HEAD_PAD": head_pad, "VEC": vec}, tiles[shape][dtype][str(head_pad)])


@functools.cache
def merge(arch: str, dtype: str) -> Variant:
    return _variant("merge_kernel", dtype, {}, config(arch)["merge"])


@functools.cache
def reshape_and_cache(arch: str, aligned: bool) -> Variant:
    return _variant("reshape_and_cache_kernel", "", {"VEC": 8 if aligned else 1}, config(arch)["reshape_and_cache"])


@functools.cache
def copy_blocks(arch: str, aligned: bool) -> Variant:
    return _variant("copy_blocks_kernel", "", {"VEC": 8 if aligned else 1}, config(arch)["copy_blocks"])


def variants(arch: str) -> list[Variant]:
    """Everything that can be launched on an architecture, each once."""
    found = [reshape_and_cache(arch, aligned) for aligned in (True, False)]
    found += [copy_blocks(arch, aligned) for aligned in (True, False)]
    for dtype in DTYPES:
        found.append(merge(arch, dtype))
        for aligned in (True, False):
            for head_dim in HEAD_PADS:
                found += [attend(arch, dtype, head_dim, aligned, num_rows) for num_rows in (1, 2**31)]
    return list(dict.fromkeys(found))


def head_pad_of(head_dim: int) -> int:
    """The smallest padded head size that holds head_dim lanes.

    Raises:
        ValueError: there is none.
    """
    for head_pad in HEAD_PADS:
        if head_dim <= head_pad:
            return head_pad
    raise ValueError(f"head_dim: the Triton backend takes up to {MAX_HEAD_DIM}, got {head_dim}")


def _variant(kernel: str, dtype: str, constants: dict, entry: dict) -> Variant:
    entry = dict(entry)
    num_warps, num_stages = entry.pop("num_warps"), entry.pop("num_stages", 1)
    return Variant(kernel, dtype, (*constants.items(), *entry.items()), num_warps, num_stages)
