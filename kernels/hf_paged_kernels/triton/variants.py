"""Which compiled form of a kernel serves a call, and the list of all that can.

Contract: dispatch takes every `Variant` from the functions here, and `variants(arch)` calls them over all of their
inputs, so what runs is in the list by construction. Tile sizes, warps and pipeline stages come from
configs/<arch>.json, or default.json where an architecture has none; both hold, for `attend_kernel`:

    narrow     up to BLOCK_M query rows a sequence and KV head: decode, and short chunks
    wide       more rows: prefill, and decode with very many heads a group
    unaligned  either, where rows do not start at multiples of 16 bytes (head sizes such as 12): slow, but right
    narrow_8bit, wide_8bit, unaligned_8bit  the same where a cache holds codes

by dtype of the query and padded head size, and for each of the other kernels one entry.

A kernel for each pair of formats, shape and dtype would be 16 times as many. So only the pairs that are likely have
their own, where they matter most, in decode: two caches of e4m3, or of int8. All others learn their formats at run time
("any"). Beside codes a cache in the query's dtype ("own") has only narrow tiles, and float32 queries only the unaligned
form: less fast, but right.
"""

import functools
import itertools
import json
from pathlib import Path

from .fp8 import FORMATS
from .runtime import TYPES, Variant

CONFIGS = Path(__file__).parent.parent / "configs"
HEAD_PADS = (64, 128, 256)
MAX_HEAD_DIM = HEAD_PADS[-1]
DTYPES = tuple(TYPES.values())
VEC_BYTES = 16
FORMAT_PAIRS = tuple(itertools.product(("own", *FORMATS.values()), repeat=2))
NAMED = ("e4m3", "int8")  # formats that the compiler may know; see above
MIXED_PAD = 128  # the least padded head size of an "own" cache beside codes


@functools.cache
def config(arch: str) -> dict:
    """The parsed configuration file of an architecture."""
    path = CONFIGS / f"{arch}.json"
    return json.loads((path if path.exists() else CONFIGS / "default.json").read_text())


@functools.cache
def attend(
    arch: str, dtype: str, head_dim: int, aligned: bool, num_rows: int, key: str = "own", value: str = "own"
) -> Variant:
    """For the larger of two head sizes, and num_rows query rows of a sequence and KV head, or more than there are.

    aligned: rows of K, V, query and out start and end at multiples of 16 bytes and, beside codes, of 16 elements.
    key, value: "own" where a cache has the query's dtype, else its format (`fp8.FORMATS`).
    """
    tiles = config(arch)["attend"]
    coded, mixed = (key, value) != ("own", "own"), key != value and "own" in (key, value)
    suffix = "_8bit" if coded else ""
    aligned = aligned and not (coded and dtype == "fp32")
    head_pad = head_pad_of(max(head_dim, MIXED_PAD) if mixed else head_dim)
    shape = "narrow"
    if not aligned:
        head_pad, shape = MAX_HEAD_DIM, "unaligned"
    elif not mixed and num_rows > tiles[f"narrow{suffix}"][dtype][str(head_pad)]["BLOCK_M"]:
        shape = "wide"
    if not (key == value in NAMED and shape == "narrow"):
        key, value = ("own" if one == "own" else "any" for one in (key, value))
    vec = vec_of(dtype, coded) if aligned else 1
    constants = {"KEY": _native(arch, key), "VALUE": _native(arch, value), "HEAD_PAD": head_pad, "VEC": vec}
    return _variant("attend_kernel", dtype, constants, tiles[f"{shape}{suffix}"][dtype][str(head_pad)])


def vec_of(dtype: str, coded: bool) -> int:
    """Elements that the attention kernel moves at once: 16 bytes of the query's dtype or, where there are, of codes."""
    return VEC_BYTES if coded else VEC_BYTES // (4 if dtype == "fp32" else 2)


def _native(arch: str, code: str) -> str:
    """The format by the name that `fp8` has for it where the GPU itself converts it."""
    kind, _, number = arch.partition("_")
    return "e4m3nv" if code == "e4m3" and kind == "sm" and int(number) >= 89 else code


@functools.cache
def merge(arch: str, dtype: str) -> Variant:
    return _variant("merge_kernel", dtype, {}, config(arch)["merge"])


@functools.cache
def reshape_and_cache(arch: str, aligned: bool) -> Variant:
    return _variant("reshape_and_cache_kernel", "", {"VEC": 8 if aligned else 1}, config(arch)["reshape_and_cache"])


@functools.cache
def quantize(arch: str, dtype: str, aligned: bool) -> Variant:
    """aligned: rows of keys, values and codes start and end at multiples of 16 elements."""
    return _variant("quantize_kernel", dtype, {"VEC": VEC_BYTES if aligned else 1}, config(arch)["quantize"])


@functools.cache
def copy_blocks(arch: str, aligned: bool, piece: str = "i16") -> Variant:
    """piece: "i16", or "u8" where blocks of codes have an odd number of bytes, which are never aligned."""
    return _variant("copy_blocks_kernel", piece, {"VEC": 8 if aligned else 1}, config(arch)["copy_blocks"])


def variants(arch: str) -> list[Variant]:
    """Everything that can be launched on an architecture, each once."""
    found = [reshape_and_cache(arch, aligned) for aligned in (True, False)]
    found += [copy_blocks(arch, *form) for form in ((True,), (False,), (False, "u8"))]
    for dtype in DTYPES:
        found.append(merge(arch, dtype))
        found += [quantize(arch, dtype, aligned) for aligned in (True, False)]
        for formats, aligned, head_dim, rows in itertools.product(FORMAT_PAIRS, (True, False), HEAD_PADS, (1, 2**31)):
            found.append(attend(arch, dtype, head_dim, aligned, rows, *formats))
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
