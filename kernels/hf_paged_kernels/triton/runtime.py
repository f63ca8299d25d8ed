"""Kernels without hidden variants, and how they are launched.

Contract: a kernel declared by `unspecialized` has one compiled form for each `Variant`, whatever values its
arguments take: Triton's specialization (an int that is 1 or a multiple of 16, an aligned pointer, an int beyond 32
bits) is off, and `launch` is the only way to run one. So `variants.variants` can name all that is ever compiled.
`architecture_of` refuses tensors that Triton cannot reach.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import fp8, interpreter

# A host that interprets has no multiprocessors; a few, so that long sequences are split there, too.
INTERPRETED_SMS = 16

_SCALARS = {tl.int64: "i64", tl.uint32: "u32", tl.float32: "fp32"}  # annotations; an int without one is int32


@dataclass(frozen=True)
class Kernel:
    """A kernel and Triton's type of each argument, in order. "*own" is a pointer to the query's dtype, "*KEY" one to
    that, too, if the constant KEY is "own", else to 8-bit codes."""

    jit: object
    types: dict[str, str]


KERNELS: dict[str, Kernel] = {}


def unspecialized(**pointers: str):
    """Decorator: triton.jit without specialization of any argument. `pointers` names the pointer arguments of each
    element type, separated by spaces."""
    elements = {name: element for element, names in pointers.items() for name in names.split()}

    def decorate(function):
        types = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name in elements:
                types[name] = f"*{elements.pop(name)}"
            elif parameter.annotation is tl.constexpr:
                types[name] = "constexpr"
            else:
                types[name] = _SCALARS.get(parameter.annotation, "i32")
        assert not elements, elements
        at_run_time = [name for name, kind in types.items() if kind != "constexpr"]
        jit = triton.jit(function, do_not_specialize=at_run_time)
        KERNELS[function.__name__] = Kernel(jit, types)
        return jit

    return decorate


@dataclass(frozen=True)
class Variant:
    """What is compiled: a kernel, the element type of its own pointers, constants and launch options.

    `variant["BLOCK_M"]` is a constant. The hash is that of the fields, so variants can be compared and collected.
    """

    kernel: str
    dtype: str  # "fp32", "bf16", "fp16"; "" or an integer type where the kernel moves bits
    constants: tuple[tuple[str, int | str], ...]
    num_warps: int
    num_stages: int

    def __getitem__(self, name: str) -> int | str:
        return dict(self.constants)[name]

    def signature(self) -> dict[str, str]:
        """Triton's type of each argument."""
        elements = {"*own": f"*{self.dtype}"}
        for name, value in self.constants:
            elements[f"*{name}"] = f"*{self.dtype}" if value == "own" else "*u8"
        return {name: elements.get(kind, kind) for name, kind in KERNELS[self.kernel].types.items()}

    def options(self) -> dict:
        """How it is compiled. Contraction of a * b + c is on: Triton 3.10 will no longer do it by itself."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=True)

    def __str__(self) -> str:
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel} {self.dtype} {constants} warps={self.num_warps} stages={self.num_stages}"


def launch(variant: Variant, grid: tuple[int, ...], *arguments) -> None:
    """Run a variant over a grid, on the device of its first argument; arguments in the kernel's order."""
    device = arguments[0].device
    run = KERNELS[variant.kernel].jit[grid]
    options = dict(variant.constants) | variant.options()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(*arguments, **options)
    else:
        run(*arguments, **options)


# -- devices ---------------------------------------------------------------------------------------


def interpreted() -> bool:
    """Whether the kernels run in Python: Triton decides it when a kernel is declared, by TRITON_INTERPRET."""
    return not isinstance(KERNELS["attend_kernel"].jit, triton.JITFunction)


def architecture_of(tensor: torch.Tensor) -> str:
    """The architecture that serves a tensor: "sm_90", "gfx942", ..., or "interpreter".

    Raises:
        RuntimeError: a CPU tensor, without Triton's interpreter.
    """
    if interpreted():
        interpreter.mend()
        return "interpreter"
    if tensor.device.type == "cpu":
        raise RuntimeError(
            "the Triton backend runs on a GPU, and these tensors are on the CPU: set TRITON_INTERPRET=1 before "
            "anything imports triton to run its kernels in Triton's interpreter (for tests: very slow)"
        )
    return _architecture(tensor.device)


@functools.cache
def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device, compute units on AMD."""
    if device.type == "cpu":
        return INTERPRETED_SMS
    properties = getattr(torch, device.type).get_device_properties(device)
    return getattr(properties, "multi_processor_count", None) or properties.max_compute_units


# -- memory ----------------------------------------------------------------------------------------


def is_aligned(tensor: torch.Tensor, elements: int = 1) -> bool:
    """Whether every row, the last dimension, starts and ends at a multiple of 16 bytes, and of so many elements."""
    steps = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1][:-1]
    steps += [tensor.shape[-1]]
    unit = max(16 // tensor.itemsize, elements)
    return tensor.data_ptr() % 16 == 0 and all(step % unit == 0 for step in steps)


def rows_together(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if the elements of its last dimension do not lie together."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def as_pieces(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as 16-bit integers, the last dimension longer where elements are wider."""
    check_dtype(tensor)
    return rows_together(tensor).view(torch.int16)


TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_dtype(tensor: torch.Tensor, name: str = "key_cache") -> None:
    """Raise ValueError unless the kernels know the dtype of a query, or of a cache that is not 8-bit."""
    if tensor.dtype not in TYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise ValueError(f"{name}: the Triton backend takes {names}, got {tensor.dtype}")


# -- 8-bit caches ----------------------------------------------------------------------------------


def is_coded(cache: torch.Tensor) -> bool:
    """Whether a cache holds 8-bit codes."""
    return cache.dtype in fp8.FORMATS


def codes_of(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache as its kernels take it, and the number of its format: codes as bytes, another one as it is (0)."""
    return (cache.view(torch.uint8), fp8.NUMBERS[cache.dtype]) if is_coded(cache) else (cache, 0)
