"""Opens the built wheel and sdist, and installs wheel, sdist and editable into throw-away environments.

Contract: run by the project's own environment after `python -m build`; exits non-zero with what
is wrong. A throw-away environment gets the package alone (--no-deps) and sees torch and
transformers through a .pth line that names this environment's site-packages; a .pth inside such
a folder is not followed, so this environment's own editable hf_paged stays invisible there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"hf_paged": ROOT, "hf_paged_kernels": ROOT / "kernels", "hf_paged_eval": ROOT / "eval"}

# Run in each environment from the repository root (where `kernels` and `eval` are folders) and from elsewhere.
PROBE = """
import importlib.util, sys
import torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import hf_paged, hf_paged_kernels, hf_paged_eval
for name in ("kernels", "eval"):
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None or "site-packages" in spec.origin, f"{name} is {spec.origin}"
for module in (hf_paged, hf_paged_kernels, hf_paged_eval):
    print(module.__file__)
expected = sys.argv[1]
assert hf_paged_kernels.choose(torch.device("cpu"), torch.float32)[0] == expected, hf_paged_kernels.describe()
"""


def main() -> None:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    for kind, arguments in (("wheel", [wheel]), ("sdist", [sdist]), ("editable", ["-e", ROOT])):
        check_install(kind, list(map(str, arguments)))
    check_install("sdist without a compiler", [str(sdist)], compiler=False)
    print("package: all fine")


def fail(message: str) -> None:
    sys.exit(f"package check failed: {message}")


def check_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    if packages != set(PACKAGES):
        fail(f"the wheel's top level is {sorted(packages)}, expected {sorted(PACKAGES)}")
    for package, parent in PACKAGES.items():
        files = [file for kind in ("*.py", "*.json", "*.toml") for file in (parent / package).rglob(kind)]
        wanted = {file.relative_to(parent).as_posix() for file in files}
        missing = sorted((wanted | {f"{package}/py.typed"}) - names)
        if missing:
            fail(f"the wheel lacks {missing}")
    if not any(fnmatch(name, "hf_paged_kernels/cpu/_paged*.so") for name in names):
        fail("the wheel lacks the C kernels: is there a C compiler?")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        fail("the wheel lacks the licence")
    print(f"{wheel.name}: {len(names)} files, {', '.join(sorted(packages))}, py.typed, the C kernels, licence")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    wanted |= {"constraints.txt", ".ci/run", "tests/conftest.py", "setup.py"}
    wanted |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "kernels").rglob("*.[ch]")}
    if wanted - names:
        fail(f"the sdist lacks {sorted(wanted - names)}")
    print(f"{sdist.name}: {len(names)} files")


def check_install(kind: str, arguments: list[str], compiler: bool = True) -> None:
    print(f"{kind}: installing into a throw-away environment", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "env"
        venv.create(home, with_pip=True)
        scripts = home / ("Scripts" if os.name == "nt" else "bin")
        python = scripts / "python"
        without = {} if compiler else {"CC": "no-such-compiler"}
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", *arguments], cwd=scratch, **without)
        site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=scratch).strip()
        (Path(site) / "project_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")

        backend = "c" if compiler else "reference"
        run([python, "-c", PROBE, backend], cwd=ROOT)
        places = run([python, "-c", PROBE, backend], cwd=scratch).split()
        expected = ROOT if kind == "editable" else Path(site)
        for place in map(Path, places):
            if not place.resolve().is_relative_to(expected.resolve()):
                fail(f"{kind}: {place} was imported, expected something under {expected}")
        version = run([scripts / "hf-paged", "--version"], cwd=scratch).strip()
        print(f"{kind}: imports from the repository root and from elsewhere, script says {version!r}", flush=True)


def run(command: list, cwd: Path | str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= variables
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        fail(f"{' '.join(map(str, command[:4]))} ... in {cwd}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
