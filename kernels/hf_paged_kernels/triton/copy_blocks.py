"""Copying whole blocks.

Contract: the operator `copy_blocks` of the package, for any floating dtype of 2 or 4 bytes, moved as 16-bit
integers. Every source is read before any destination is written, whatever chains or swaps the pairs hold: the
kernel runs twice, first from the caches into a scratch of N blocks, then from there into the caches.
"""

import torch
import triton
import triton.language as tl

from . import runtime, variants
from .runtime import unspecialized


@unspecialized(i16="key_source value_source key_target value_target", i64="pairs")
def copy_blocks_kernel(
    key_source,  # [.., key_units * VEC] blocks, contiguous
    value_source,  # [.., value_units * VEC] blocks, contiguous
    key_target,  # like key_source
    value_target,  # like value_source
    pairs,  # [N, 2] int64, contiguous
    gather,  # 1: block pairs[i, 0] to place i; 0: place i to block pairs[i, 1]
    key_units,  # 16-bit pieces of a block of keys / VEC
    value_units,
    VEC: tl.constexpr,  # pieces of 16 bytes where everything is aligned to them, else 1
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(pairs + 2 * place + (1 - gather))
    source = tl.where(gather != 0, block, place)
    target = tl.where(gather != 0, place, block)
    first = tl.program_id(1) * BLOCK
    move_piece(key_source, key_target, source, target, first, key_units, VEC, BLOCK)
    move_piece(value_source, value_target, source, target, first, value_units, VEC, BLOCK)


@triton.jit
def move_piece(from_blocks, to_blocks, source, target, first, units, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK pieces, from `first` on, of one block of units * VEC pieces."""
    size = units * VEC
    from_block = from_blocks + source * size
    to_block = to_blocks + target * size
    if VEC > 1:
        from_block = tl.multiple_of(from_block, 16)
        to_block = tl.multiple_of(to_block, 16)
    piece = first + tl.arange(0, BLOCK)
    tl.store(to_block + piece, tl.load(from_block + piece, mask=piece < size), mask=piece < size)


@torch.no_grad()
def copy_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks, in place; see the package's function."""
    arch = runtime.architecture_of(key_cache)
    num_pairs = pairs.shape[0]
    if num_pairs == 0:
        return
    caches = [runtime.as_pieces(cache).flatten(1) for cache in (key_cache, value_cache)]
    scratch = [cache.new_empty(num_pairs, cache.shape[1]) for cache in caches]
    variant = variants.copy_blocks(arch, all(map(runtime.is_aligned, caches)))
    sizes = [cache.shape[1] for cache in caches]
    grid = (num_pairs, triton.cdiv(max(sizes), variant["BLOCK"]))
    units = [size // variant["VEC"] for size in sizes]
    pairs = pairs.contiguous()
    runtime.launch(variant, grid, *caches, *scratch, pairs, 1, *units)
    runtime.launch(variant, grid, *scratch, *caches, pairs, 0, *units)
