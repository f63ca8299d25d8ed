"""Light checks of the packaging; `make package` builds and installs for real.

Contract: pyproject.toml finds exactly the three packages, and nothing in the repository shadows
what transformers imports.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {"hf_paged", "hf_paged_kernels", "hf_paged_eval"}


def start(code: str, cwd: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], cwd=cwd, env=environment, text=True, **pipes)


def output(process: subprocess.Popen) -> str:
    with process:
        try:
            said, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, errors
    return said


def test_three_packages_are_found():
    find_packages = pytest.importorskip("setuptools").find_packages
    config = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert config["namespaces"] is False
    found = [name for where in config["where"] for name in find_packages(ROOT / where, include=config["include"])]
    assert len(found) == len(set(found))
    assert {name.split(".")[0] for name in found} == PACKAGES


def test_types_are_shipped():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for package, parent in (("hf_paged", "."), ("hf_paged_kernels", "kernels"), ("hf_paged_eval", "eval")):
        assert "py.typed" in data[package]
        assert (ROOT / parent / package / "py.typed").exists()


def test_every_module_of_the_script_exists():
    module, _, function = PROJECT["project"]["scripts"]["hf-paged"].partition(":")
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert f"def {function}(" in source


def test_version_is_said_once_and_the_same():
    source = (ROOT / "hf_paged" / "__init__.py").read_text(encoding="utf-8")
    said = re.search(r'__version__ = "([^"]+)"', source)
    assert said is None or said[1] == PROJECT["project"]["version"]


def test_constraints_satisfy_the_dependencies():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    extras = PROJECT["project"]["optional-dependencies"].values()
    for text in [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name != "setuptools":
            assert name in pins, f"{name} has no tested version in constraints.txt"
            assert requirement.specifier.contains(pins[name])


def test_the_repository_root_shadows_nothing():
    code = """
import importlib.util
import transformers, hf_paged, hf_paged_kernels, hf_paged_eval
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
for name in ("kernels", "eval"):
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None or "site-packages" in spec.origin, spec
print(is_kernels_available())
"""
    elsewhere = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    both = start(code, ROOT), start(elsewhere, ROOT.parent)  # at once: what takes long is importing
    here, there = (output(process).split()[-1] for process in both)
    assert here == there
