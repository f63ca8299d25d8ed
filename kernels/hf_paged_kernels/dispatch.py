"""Which backend runs an operator: by device, dtype and head size, or by force.

Contract: a backend is a module with the four functions of `OPS`, signatures as in `reference`, whose arguments it
may trust. `choose` is the whole policy. Nothing here imports a backend's library before it is needed.
"""

import importlib
import importlib.util
import logging
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from . import cpu, reference
from .checks import DTYPES
from .quantize import QMAX

OPS = ("reshape_and_cache", "paged_decode", "paged_prefill", "copy_blocks")
TRITON_MAX_HEAD_DIM = 256
NARROW = (torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger("hf_paged_kernels")


class _Later:
    """A module that is imported at its first use: triton takes a second, and a CPU user never needs it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name, __package__), attribute)


def _find_backends() -> tuple[dict, dict]:
    """Backends that can run here, and for each of the others the reason why not."""
    found, missing = {"reference": reference}, {}
    library, why = cpu.load()
    if library is None:
        missing["c"] = why
        logger.warning("paged attention on the CPU runs in plain torch: %s", why)
    else:
        found["c"] = cpu
    if importlib.util.find_spec("triton") is None:
        missing["triton"] = "triton is not installed"
    else:
        found["triton"] = _Later(".triton")
    return found, missing


BACKENDS, MISSING = _find_backends()

_forced: ContextVar[str | None] = ContextVar("hf_paged_kernels_backend", default=None)


def forced() -> str | None:
    """The backend that `backend` forces here."""
    return _forced.get()


def choose(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> tuple[str, str]:
    """The backend for queries of this dtype, caches on this device and their (larger) head size, and why."""
    name = forced()
    if name is not None:
        if name == "c" and device.type != "cpu":  # plain pointers: it would read another device's addresses
            raise ValueError(f"backend('c'): expected caches on the CPU, got {device}")
        return name, f"forced by backend({name!r})"
    if dtype not in NARROW and dtype not in QMAX:
        return "reference", "plain torch: the kernels accumulate in float32"
    if device.type == "cpu":
        if "c" in BACKENDS:
            return "c", cpu.load()[1]
        return "reference", f"plain torch: {MISSING['c']}"
    if device.type in ("cuda", "xpu"):
        if "triton" not in BACKENDS:
            return "reference", f"plain torch: {MISSING['triton']}"
        if head_dim > TRITON_MAX_HEAD_DIM:
            return "reference", f"plain torch: head_dim {head_dim} is over {TRITON_MAX_HEAD_DIM}"
        return "triton", f"Triton, head_dim up to {TRITON_MAX_HEAD_DIM}"
    return "reference", f"plain torch: no kernels for {device.type}"


def backend(name: str):
    """Context manager: every operator called inside it, in this thread or task, runs on this backend.

    Raises:
        ValueError: no such backend here; the message has the reason where it is one that could be.
    """
    if name not in BACKENDS:
        reason = f" ({MISSING[name]})" if name in MISSING else ""
        raise ValueError(f"backend: expected one of {sorted(BACKENDS)}, got {name!r}{reason}")
    return _force(name)


@contextmanager
def _force(name: str):
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def describe() -> str:
    """What runs where, and why, a line for each kind of device."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() and _forced.get() != "c" else ["cpu"]
    lines = [f"hf_paged_kernels: known backends: {', '.join(sorted(BACKENDS))}"]
    for device in devices:
        chosen = {dtype: choose(torch.device(device), dtype) for dtype in DTYPES}
        for name, why in sorted(set(chosen.values())):
            dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES if chosen[dtype] == (name, why)]
            lines.append(f"{device}: {name} for {', '.join(dtypes)} ({why})")
    lines += [f"not here: {name} ({why})" for name, why in sorted(MISSING.items())]
    return "\n".join(lines)
