"""Copying whole blocks.

Contract: the operator `copy_blocks` of the package, for any floating dtype of 2 or 4 bytes and 8-bit codes, moved as
16-bit integers (as bytes where a block has an odd number of them). Scales that belong to slots are copied with their
blocks; those of heads have none. Every source is read before any destination is written, whatever chains or swaps the
pairs hold: the kernel runs twice, first from the caches into a scratch of N blocks, then from there into the caches.
"""

import torch
import triton
import triton.language as tl

from . import runtime, variants
from .runtime import unspecialized


@unspecialized(own="key_source value_source key_target value_target", i64="pairs")
def copy_blocks_kernel(
    key_source,  # [.., key_units * VEC] blocks, contiguous
    value_source,  # [.., value_units * VEC] blocks, contiguous
    key_target,  # like key_source
    value_target,  # like value_source
    pairs,  # [N, 2] int64, contiguous
    gather,  # 1: block pairs[i, 0] to place i; 0: place i to block pairs[i, 1]
    key_units,  # pieces of a block of keys / VEC
    value_units,
    VEC: tl.constexpr,  # pieces that fill 16 bytes where everything is aligned to them, else 1
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
def copy_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pairs: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy whole blocks, in place; see the package's function."""
    arch = runtime.architecture_of(key_cache)
    if pairs.shape[0] == 0:
        return
    pairs = pairs.contiguous()
    _copy_pair(arch, key_cache, value_cache, pairs)
    scales = [scale for scale in (k_scale, v_scale) if scale is not None and scale.dim() == 3]
    if scales:
        none = scales[0].new_empty(scales[0].shape[0], 0)
        _copy_pair(arch, *[*scales, none][:2], pairs)


def _copy_pair(arch: str, first: torch.Tensor, second: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy the same blocks of two tensors [num_blocks, ..]; those of the second may be empty."""
    tensors = [_pieces(tensor, torch.int16) for tensor in (first, second)]
    piece = "i16"
    if None in tensors:
        tensors, piece = [_pieces(tensor, torch.uint8) for tensor in (first, second)], "u8"
    num_pairs = pairs.shape[0]
    scratch = [tensor.new_empty(num_pairs, tensor.shape[1]) for tensor in tensors]
    aligned = piece == "i16" and all(map(runtime.is_aligned, tensors))
    variant = variants.copy_blocks(arch, aligned, piece)
    sizes = [tensor.shape[1] for tensor in tensors]
    grid = (num_pairs, triton.cdiv(max(sizes), variant["BLOCK"]))
    units = [size // variant["VEC"] for size in sizes]
    runtime.launch(variant, grid, *tensors, *scratch, pairs, 1, *units)
    runtime.launch(variant, grid, *scratch, *tensors, pairs, 0, *units)


def _pieces(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """[num_blocks, pieces of this dtype], or None where a block or its address is no whole number of them."""
    if not runtime.is_coded(tensor):
        runtime.check_dtype(tensor)
    size, start = tensor.shape[1:].numel() * tensor.itemsize, tensor.data_ptr()
    if size % dtype.itemsize or start % dtype.itemsize:
        return None
    return tensor.flatten(1).view(dtype)
