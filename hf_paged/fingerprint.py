"""A fingerprint of what tensors contain: exact, and the same for any number of threads.

On a CPU the kernels' C library adds it up, as fast as memory is read (`hf_paged_kernels.content_sums`); elsewhere, and
without the library, torch does, as follows.

Contract: `fingerprint(tensors)` reads every byte once and changes nothing. Equal content of tensors of equal shapes,
dtypes and strides gives equal fingerprints. A change of any one 64-bit word always gives another one; other changes
go unseen with a probability of about 2**-64, as long as they are not made for it.

The bytes are read as 64-bit integers `x`, and a piece of them as a matrix `[rows, COLUMNS]`. Column `c` sums
`x[piece, row, c] * weight[row] * scale[piece]` modulo 2**64. Weights are odd, hence invertible modulo 2**64: that is
why no single word can change unseen. Integer sums do not depend on their order, so neither on threads. A product
with an odd weight moves a flip of a word's top bit nowhere, and two such flips in one column cancel. COLUMNS is a
prime for that: the elements of one row or column of a weight fall into different columns here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

import hf_paged_kernels

COLUMNS = 509
_ROWS = 4096
_PIECE = _ROWS * COLUMNS  # words, 16.7 MB
_THREADED_FROM = 1 << 25  # bytes: below 32 MiB starting threads costs more than it saves
_MAX_THREADS = 8  # a memory bus is busy with fewer
_MASK = (1 << 64) - 1

_TAKES_C = hf_paged_kernels.content_sums([]) is not None

Fingerprint = dict[str, tuple[int, ...]]


def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Sums of the tensors' content: for each device some integers, of which one differs where content does.

    Tensors may be of any dtype, shape, strides and layout; those on the meta device have no content. The order
    of the tensors counts.
    """
    jobs: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    by_c: list[torch.Tensor] = []
    with torch.inference_mode():
        for index, tensor in enumerate(tensors):
            if _TAKES_C and tensor.device.type == "cpu":
                by_c.append(_flat(tensor))
            elif tensor.device.type != "meta" and tensor.numel():
                jobs.setdefault(tensor.device, []).extend(_pieces(index, tensor))
        sums = {str(device): _sums(device, pieces) for device, pieces in jobs.items()}
        found = {device: tuple(columns.tolist()) for device, columns in sums.items()}
        return found | {"cpu": tuple(hf_paged_kernels.content_sums(by_c))} if by_c else found


def _sums(device: torch.device, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The column sums `[COLUMNS]` int64 of the pieces of one device."""
    size = sum(words.numel() for _, words in pieces) * 8
    workers = min(torch.get_num_threads(), _MAX_THREADS, len(pieces))
    if device.type != "cpu" or workers == 1 or size < _THREADED_FROM:
        return _add_up(device, pieces)
    shares: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for piece in sorted(pieces, key=lambda piece: piece[1].numel(), reverse=True):
        least = loads.index(min(loads))
        shares[least].append(piece)
        loads[least] += piece[1].numel()
    # torch multiplies integers in one thread, and without Python's lock.
    with ThreadPoolExecutor(workers - 1) as executor:
        others = [executor.submit(_add_up, device, share) for share in shares[1:]]
        first = _add_up(device, shares[0])
        return functools.reduce(torch.add, [other.result() for other in others], first)


@torch.inference_mode()
def _add_up(device: torch.device, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    columns = torch.zeros(COLUMNS, dtype=torch.int64, device=device)
    weights = _weights(device)
    add = _add_product if device.type == "cpu" else _add_product_elsewhere
    for number, words in pieces:
        rows = words.numel() // COLUMNS
        if rows:
            add(columns, words[: rows * COLUMNS].view(rows, COLUMNS), weights[:rows], _odd(2 * number))
        rest = words[rows * COLUMNS :]
        if rest.numel():
            columns[: rest.numel()].add_(rest, alpha=_odd(2 * number + 1))
    return columns


def _add_product(columns: torch.Tensor, matrix: torch.Tensor, weights: torch.Tensor, scale: int) -> None:
    """Add `scale * (matrix.T @ weights)` to `columns`."""
    torch.addmv(columns, matrix.t(), weights, alpha=scale, out=columns)


def _add_product_elsewhere(columns: torch.Tensor, matrix: torch.Tensor, weights: torch.Tensor, scale: int) -> None:
    """The same on accelerators, which have no product of integer matrices."""
    columns.add_((matrix * weights[:, None]).sum(0), alpha=scale)


def _pieces(index: int, tensor: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """(number, 64-bit words) of a tensor, in pieces of at most `_PIECE` words. No two pieces have one number."""
    data = _flat(tensor)
    size = data.numel() * data.element_size()
    number = index << 32
    if size % 8 == 0:
        words = data.view(torch.int64)
    else:
        data = data.view(torch.uint8)
        words = data[: size // 8 * 8].view(torch.int64)
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[: size % 8] = data[size // 8 * 8 :]
        yield number, last.view(torch.int64)
    for start in range(0, words.numel(), _PIECE):
        number += 1
        yield number, words[start : start + _PIECE]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The content in one dimension, in the order of memory, at a multiple of 8 bytes of the storage.

    A view where the tensor fills its memory, which is the rule; otherwise a copy.
    """
    data = tensor.detach()
    if data.layout != torch.strided:
        data = data.to_dense()
    elif data.is_quantized:
        data = data.dequantize()
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    if not data.is_contiguous():
        data = data.permute(sorted(range(data.dim()), key=data.stride, reverse=True)).contiguous()
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    return data.view(-1)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """The rows' weights, `[_ROWS]` int64, odd."""
    return torch.tensor([_odd(-1 - row) for row in range(_ROWS)], dtype=torch.int64, device=device)


def _odd(number: int) -> int:
    """A pseudo-random odd 64-bit integer of a number (the mixing step of the generator SplitMix64)."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed = (mixed ^ (mixed >> 31)) | 1
    return mixed - (1 << 64) if mixed >> 63 else mixed
