"""Whether tensors and dicts are still what they were, looked at in C.

Contract: an `ObjectSnapshot` compares versions and addresses of tensors by value and entries of dicts by identity, in
the order that a plain dict has. So "holds" is certain, while "does not" may also mean that something was replaced by an
equal one. It keeps what it was made of alive. There are none without the C library, nor on a Python that objects.c
cannot look into: one without a lock, or whose objects move.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import cache

import torch

from . import load

_FIELDS = struct.Struct("=17q")
_GET, _NOARGS = 54, 4  # Py_tp_descr_get and METH_NOARGS of Python's stable interface


@cache
def _entry():
    """The C function, called with Python's lock held; None where there is none, or it may not be called."""
    library, _ = load()
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    if library is None or sys.implementation.name != "cpython" or not locked or _interface() is None:
        return None
    holds = ctypes.PyDLL(library._name).hf_paged_holds
    holds.argtypes = [ctypes.c_char_p]
    return holds


@cache
def _interface() -> tuple[int, ...] | None:
    """Addresses of what objects.c calls; None if torch's `data_ptr` is not a C function without arguments."""
    python, method, version = ctypes.pythonapi, torch.empty(0).data_ptr, vars(torch._C.TensorBase)["_version"]
    if type(method) is not type(len) or _function("PyCFunction_GetFlags", ctypes.c_int)(method) != _NOARGS:
        return None
    functions = (python.PyLong_AsLongLong, python.PyErr_Occurred, python.Py_DecRef, python.PyDict_Next)
    return (
        _function("PyType_GetSlot", ctypes.c_void_p, ctypes.c_int)(type(version), _GET),
        _function("PyCFunction_GetFunction", ctypes.c_void_p)(method),
        *(ctypes.cast(function, ctypes.c_void_p).value for function in functions),
        id(version),
    )


def _function(name: str, result, *more):
    """A function of Python's stable interface, of an object and `more`."""
    return ctypes.PYFUNCTYPE(result, ctypes.py_object, *more)((name, ctypes.pythonapi))


class ObjectSnapshot:
    """Versions of some tensors, addresses of others, and what dicts hold.

    Args:
        versioned: tensors that count their changes.
        pointed: tensors that have an address.
        dicts: their entries are compared by identity.
    """

    @staticmethod
    def available() -> bool:
        """Whether they can be made here."""
        return _entry() is not None

    def __init__(
        self, versioned: Sequence[torch.Tensor], pointed: Sequence[torch.Tensor], dicts: Sequence[dict]
    ) -> None:
        self._holds = _entry()
        # In a dict's own order, as C reads it: an OrderedDict tells of another one.
        entries = [part for each in dicts for entry in dict.items(each) for part in entry]
        arrays = [
            _pointers(versioned),
            _pointers(pointed),
            (ctypes.c_int64 * len(pointed))(*[tensor.data_ptr() for tensor in pointed]),
            _pointers(dicts),
            (ctypes.c_int64 * len(dicts))(*map(len, dicts)),
            _pointers(entries),
        ]
        self._kept = (list(versioned), list(pointed), list(dicts), entries, arrays)
        tensors, places, addresses, owners, sizes, items = map(ctypes.addressof, arrays)
        total = sum(tensor._version for tensor in versioned)
        self._packed = _FIELDS.pack(
            *_interface(),
            *(len(versioned), tensors, total),
            *(len(pointed), places, addresses),
            *(len(dicts), owners, sizes, items),
        )

    def holds(self) -> bool:
        """Whether all is as it was; what reading a tensor raises."""
        return self._holds(self._packed) == 1


def _pointers(objects: Sequence) -> ctypes.Array:
    return (ctypes.c_void_p * len(objects))(*map(id, objects))
