"""Compiles every variant for every supported architecture; needs no GPU.

    python -m hf_paged_kernels.triton.aot [--targets sm_90 gfx942] [--filter "attend_kernel bf16"] [--jobs 2]

Contract: prints registers, shared memory and stack (spilled registers live there) of each variant of
`variants.variants`, and exits with 1 if one does not compile or needs more memory than the card gives a program.
Compiles from nothing, in a cache of its own. Refuses to run under TRITON_INTERPRET, where nothing is compiled.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import runtime, variants


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    max_shared: int  # bytes of shared memory (LDS) that one program may have


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166912),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 101376),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232448),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232448),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65536),
    # Served by default.json, and compiled only if asked for.
    "sm_86": Target(GPUTarget("cuda", 86, 32), 101376),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 101376),
    "gfx90a": Target(GPUTarget("hip", "gfx90a", 64), 65536),
    "gfx1100": Target(GPUTarget("hip", "gfx1100", 32), 65536),
}
SUPPORTED = ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"]
MAX_TENSOR_MEMORY = 512  # columns, on sm_100


@dataclass(frozen=True)
class Row:
    """What compiling one variant gave; `error` is empty if it may be launched."""

    target: str
    variant: str
    registers: str = ""
    shared: int = 0
    stack: int = 0
    error: str = ""

    def __str__(self) -> str:
        line = f"{self.target:7} {self.registers:>9} {self.shared:7} {self.stack:6}  {self.variant}"
        return f"{line}\n    {self.error}" if self.error else line


HEADER = f"{'target':7} {'registers':>9} {'shared':>7} {'stack':>6}  variant"


def compile_variant(name: str, variant: runtime.Variant):
    """Triton's compiled kernel of a variant for a target, through the same types and options as a launch."""
    kernel = runtime.KERNELS[variant.kernel].jit
    source = ASTSource(kernel, variant.signature(), dict(variant.constants))
    return triton.compile(source, target=TARGETS[name].gpu, options=variant.options())


def measure(name: str, variant: runtime.Variant) -> Row:
    """Compile a variant and read what it needs."""
    try:
        compiled = compile_variant(name, variant)
    except Exception as error:  # whatever a compiler raises belongs in the table
        return Row(name, str(variant), error=f"{type(error).__name__}: {str(error).strip()[-500:]}")
    registers, stack = needs_of(compiled)
    shared, error = compiled.metadata.shared, ""
    if shared > TARGETS[name].max_shared:
        error = f"needs {shared} bytes of shared memory, a program on {name} has {TARGETS[name].max_shared}"
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    if tensor_memory > MAX_TENSOR_MEMORY:
        error = f"needs {tensor_memory} columns of tensor memory, {name} has {MAX_TENSOR_MEMORY}"
    return Row(name, str(variant), registers, shared, stack, error)


def needs_of(compiled) -> tuple[str, int]:
    """(registers, bytes of stack) of a thread; on AMD the registers are vector+accumulation and scalar ones."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
        return registers, int(stack)

    def field(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"]).group(1))

    return f"{field('vgpr_count')}/{field('sgpr_count')}", field("private_segment_fixed_size")


def run(targets: list[str], wanted: str, jobs: int) -> int:
    """Compile, print the table and a summary; the exit code."""
    work = [(name, variant) for name in targets for variant in variants.variants(name) if wanted in str(variant)]
    if not work:
        print(f"no variant holds {wanted!r}", file=sys.stderr)
        return 2
    print(HEADER)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for row in pool.map(measure, *zip(*work, strict=True)):
                rows.append(row)
                print(row, flush=True)
    failed = [row for row in rows if row.error]
    spilled = [row for row in rows if row.stack and not row.error]
    for name in targets:
        largest = max((row.shared for row in rows if row.target == name), default=0)
        print(f"{name}: at most {largest} of {TARGETS[name].max_shared} bytes of shared memory")
    spent = os.times()
    seconds = spent.user + spent.system + spent.children_user + spent.children_system
    print(
        f"{len(rows) - len(failed)} of {len(rows)} variants fit, {len(spilled)} of them with a stack (spills), "
        f"after {seconds:.0f} s of CPU"
    )
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_paged_kernels.triton.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=SUPPORTED, metavar="ARCH")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only variants whose line holds TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    options = parser.parse_args(arguments)
    if runtime.interpreted():
        print("TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it", file=sys.stderr)
        return 2
    return run(options.targets, options.filter, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
