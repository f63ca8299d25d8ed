"""Products of rows with a Hadamard matrix in C, for tensors that nothing watches.

Contract: `hadamard_product` serves plain tensors on the CPU whose values are there and whose history nobody records.
For anything else, and without the C library, it returns None, and the caller multiplies by a matrix. Sums are in
float32, each row's in one order: its bits depend on neither the rows beside it, nor threads, nor instruction set.
"""

from __future__ import annotations

import struct
from ctypes import c_char_p
from functools import cache

import torch
from torch._C import _functorch

from . import DTYPES, load

LARGEST_PART = 1024  # of paged.h
_ROTATING = struct.Struct("=12qdq")


@cache
def _entry():
    library, _ = load()
    if library is None:
        return None
    rotate = library.hf_paged_rotate
    rotate.argtypes, rotate.restype = [c_char_p], None
    return rotate


def hadamard_product(states: torch.Tensor, part: int, factor: float, dtype: torch.dtype) -> torch.Tensor | None:
    """Equal parts of rows, each times the Hadamard matrix H of +1 and -1 in Sylvester's order and a factor.

    Args:
        states: `[..., n]` of float32, bfloat16 or float16, of up to four dimensions and any strides.
        part: size of a part, a power of two from 2 to 1024 that divides n.
        factor: exact as float32, a power of two for exact entries.
        dtype: of the result, float32 or that of `states`.

    Returns:
        A contiguous tensor of the shape of `states`, or None where it cannot be had here.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or type(states) is not torch.Tensor
        or not states.is_cpu
        or (kind := DTYPES.get(states.dtype)) is None
        or (out_kind := DTYPES.get(dtype)) is None
        or states.requires_grad
        and torch.is_grad_enabled()
        or _is_watched(states)
        or (rotate := _entry()) is None
    ):
        return None
    shape, size = states.shape, states.itemsize
    if not 1 <= len(shape) <= 4 or not _parts_fit(shape[-1], part):
        return None
    row = shape[-1]
    if states.is_contiguous():  # in decoding mostly, dimensions of one element being no hindrance
        out = torch.empty_like(states) if kind == out_kind else states.new_empty(shape, dtype=dtype)
        rows = (1, 1, states.numel() // row, row, 0, 0, row * size)
    else:
        if states.stride(-1) != 1:
            states = states.contiguous()
        out = states.new_empty(shape, dtype=dtype)
        strides = [stride * size for stride in states.stride()[:-1]]
        missing = 4 - len(shape)
        rows = (*(1,) * missing, *shape, *(0,) * missing, *strides)
    rotate(
        _ROTATING.pack(states.data_ptr(), out.data_ptr(), kind, out_kind, *rows, part, factor, torch.get_num_threads())
    )
    return out


def _parts_fit(row: int, part: int) -> bool:
    return 2 <= part <= LARGEST_PART and part & (part - 1) == 0 and row > 0 and row % part == 0


def _is_watched(states: torch.Tensor) -> bool:
    """Whether something traces, transforms or intercepts operations, or the memory does not hold the values."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or _functorch.is_functorch_wrapped_tensor(states)
        or torch.autograd.forward_ad._current_level >= 0
        or states.layout is not torch.strided
        or states.is_neg()
    )
