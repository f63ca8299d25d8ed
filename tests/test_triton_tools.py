"""The ahead-of-time compiler and the tuner of the Triton backend. Neither needs a GPU to be tested.

`python -m hf_paged_kernels.triton.aot` compiles everything, for minutes; here it compiles a few variants.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from hf_paged_kernels.triton import aot, interpreter, runtime, tune, variants


def test_aot_compiles_for_nvidia_and_amd():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "hf_paged_kernels.triton.aot", "--targets", "sm_90", "gfx942", "--jobs", "1"]
    command += ["--filter", "attend_kernel bf16 KEY=own VALUE=own HEAD_PAD=64 VEC=8 BLOCK_M=16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == aot.HEADER and len(lines) == 6
    nvidia, amd = (line.split() for line in lines[1:3])
    assert nvidia[0] == "sm_90" and 32 <= int(nvidia[1]) <= 255 and 16_384 <= int(nvidia[2]) <= 232_448
    assert amd[0] == "gfx942" and 32 <= int(amd[1].split("/")[0]) <= 512 and 8_192 <= int(amd[2]) <= 65_536
    assert nvidia[3] == amd[3] == "0"  # spills
    assert "2 of 2 variants fit, 0 of them with a stack" in lines[-1]


def test_aot_refuses_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "interpreted", lambda: True)
    assert aot.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(runtime, "interpreted", lambda: False)
    assert aot.main(["--filter", "no such kernel"]) == 2
    assert "no variant holds 'no such kernel'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--targets", "sm_1"])


AMDGCN = ".vgpr_count:     99\n.sgpr_count:     40\n.private_segment_fixed_size: 8\n"


@pytest.mark.parametrize(
    "needs, error",
    [
        (dict(shared=65_536), ""),
        (dict(shared=65_537), "needs 65537 bytes of shared memory, a program on gfx942 has 65536"),
        (dict(shared=1, tmem_size=513), "needs 513 columns of tensor memory, gfx942 has 512"),
    ],
)
def test_aot_fails_what_does_not_fit(needs, error, monkeypatch):
    compiled = SimpleNamespace(asm={"amdgcn": AMDGCN}, metadata=SimpleNamespace(**needs))
    monkeypatch.setattr(aot, "compile_variant", lambda *_: compiled)
    row = aot.measure("gfx942", variants.merge("gfx942", "bf16"))
    assert (row.registers, row.stack, row.error) == ("99/40", 8, error)


def test_aot_reports_what_does_not_compile(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(aot, "compile_variant", broken)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda *_, **__: InThisProcess())
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert aot.run(["sm_80"], "merge_kernel", 1) == 1
    monkeypatch.delenv("TRITON_CACHE_DIR")
    text = capsys.readouterr().out
    assert text.count("RuntimeError: PassManager::run failed") == 3 and "0 of 3 variants fit" in text


class InThisProcess:
    map = staticmethod(map)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


# -- tune ------------------------------------------------------------------------------------------


@pytest.fixture
def small_problems(monkeypatch):
    """Problems that the interpreter can do; a candidate counts as the faster the fewer positions its tiles have."""
    sizes = {"BLOCK_M": [16], "BLOCK_N": [64, 16, 32], "num_warps": [4], "num_stages": [2]}
    used, use = [], tune.use
    monkeypatch.setattr(tune, "CONTEXT", 32)
    monkeypatch.setattr(tune, "KV_HEADS", 1)
    monkeypatch.setattr(tune, "CANDIDATES", dict.fromkeys(tune.CANDIDATES, sizes))
    monkeypatch.setattr(tune, "use", lambda *where: (used.append(where[-1]), use(*where)))
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, return_mode: used[-1]["BLOCK_N"] / 100)
    interpreter.mend()  # as the function that this replaces does
    monkeypatch.setattr(runtime, "architecture_of", lambda tensor: "default")
    yield used
    variants.config.cache_clear()
    variants.attend.cache_clear()


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a measurement, on a CPU")


@WITHOUT_GPU
@pytest.mark.parametrize("shape", ["narrow", "wide", "unaligned", "narrow_8bit", "wide_8bit", "unaligned_8bit"])
def test_tune_keeps_the_fastest(shape, small_problems):
    pad = "256" if shape.startswith("unaligned") else "64"
    dtype = next(iter(variants.config("default")["attend"][shape]))
    kept, took = tune.best("default", shape, dtype, int(pad), "cpu")
    assert kept["BLOCK_N"] == 16 and took == 0.16
    assert variants.config("default")["attend"][shape][dtype][pad] == kept


@WITHOUT_GPU
def test_tune_leaves_out_what_does_not_run_and_stops_at_what_is_wrong(small_problems, monkeypatch):
    decode = tune.paged_decode

    def no_small_tiles(*arguments, **options):
        if small_problems[-1]["BLOCK_N"] == 16:
            raise RuntimeError("out of resource: shared memory")
        return decode(*arguments, **options)

    monkeypatch.setattr(tune, "paged_decode", no_small_tiles)
    assert tune.best("default", "narrow", "fp32", 64, "cpu")[0]["BLOCK_N"] == 32
    monkeypatch.setattr(tune, "paged_decode", lambda *arguments, **options: decode(*arguments, **options) * 1.01)
    with pytest.raises(RuntimeError, match="wrong by"):
        tune.best("default", "narrow", "fp32", 64, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_tune_refuses_without_a_gpu(capsys):
    assert tune.main([]) == 2
    assert "no GPU here" in capsys.readouterr().err
