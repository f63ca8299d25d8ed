"""Captures that need no device: what a CUDA graph does, operator by operator.

Contract: a `Tape` keeps what a function did to tensors: every operator with the very tensors that it read and wrote.
Its replay runs no line of the function again and reads only memory that was there when it was recorded; what the
function made for itself is spoilt before. So whatever a replay gets right depends on the recorded memory alone.
`Again` keeps the function itself and runs it again, for forwards whose operators a dispatch mode does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils


class Tape(TorchDispatchMode):
    """Records operators while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple] = []
        self._known: set[int] = set()
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._known.update(map(_address, _tensors((args, kwargs))))
        out = func(*args, **kwargs)
        if not _is_view(func):
            self.entries.append((func, args, kwargs, out))
        for tensor in _tensors(out):
            if _address(tensor) not in self._known:
                self._known.add(_address(tensor))
                self._made.append(tensor)
        return out

    def replay(self) -> None:
        for tensor in self._made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
        for func, args, kwargs, out in self.entries:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if _address(old) != _address(new):
                    old.copy_(new)


class TapeCapture:
    """Takes the place of CudaCapture. `around` is called with a replay, and calls it."""

    def __init__(self, around: Callable[[Callable[[], None]], None] = lambda replay: replay()) -> None:
        self._around = around
        self.replays = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape, mock.patch.object(import_utils, "is_cuda_stream_capturing", lambda: True):
            function()

        def replay() -> None:
            self.replays += 1
            self._around(tape.replay)

        return replay


class Again(TapeCapture):
    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


def _is_view(func) -> bool:
    infos = [one.alias_info for one in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
