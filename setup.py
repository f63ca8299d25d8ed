"""Builds the C kernels. Everything else about the package is in pyproject.toml.

Contract: the extension is plain C11 that knows neither Python nor torch, so one build serves every Python version of
a platform. It is optional: where no compiler is found, or it fails, the installation goes on without it, and
hf_paged_kernels says so once and computes in plain torch.

OpenMP: the sources are compiled with it but the library is not linked to a runtime. At run time its symbols are
found in the one that torch has loaded for the process, so that both share one pool of threads; two runtimes
would spin against each other.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU = Path("kernels") / "hf_paged_kernels" / "cpu"
FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
QUIET = ["-Wno-psabi", "-Wno-unknown-pragmas"]  # vectors stay inside a file, OpenMP may be switched off
# The first of these that the compiler takes. Without OpenMP (Apple's clang) one thread does the work.
OPENMP = (["-fopenmp"], ["-Xpreprocessor", "-fopenmp"], ["-DHF_PAGED_WITHOUT_OPENMP"])


def compiles(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # no such compiler: the extension's own build will say so
        return False


class BuildKernels(build_ext):
    """Finds the flags of this compiler first."""

    def build_extension(self, extension):
        extension.extra_compile_args = FLAGS + QUIET + self.openmp_flags()
        super().build_extension(extension)

    def openmp_flags(self) -> list[str]:
        compiler = getattr(self.compiler, "compiler_so", None) or []  # another kind of compiler fails later, by itself
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text("#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n")
            for flags in OPENMP[:-1]:
                if compiles([*compiler, *flags, "-c", str(source), "-o", str(source) + ".o"]):
                    return flags
        return OPENMP[-1]

    def get_export_symbols(self, extension):
        return []  # no PyInit function: the library is opened by ctypes


setup(
    ext_modules=[
        Extension(
            "hf_paged_kernels.cpu._paged",
            sources=sorted(str(file) for file in CPU.glob("*.c")),
            depends=sorted(str(file) for file in CPU.glob("*.h")),
            extra_link_args=["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else [],
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=True,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
