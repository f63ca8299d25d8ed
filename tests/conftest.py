"""What every test shares: quiet threads, no network, deterministic hypothesis, the demo model.

Contract: importing this module, before any test imports transformers or triton, switches the Hub offline and,
without a GPU, Triton to its interpreter.
`demo_model` is converted at most once on a machine (in the user's cache, or HF_PAGED_CACHE);
tests share it and must not change it.
"""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its kernels run in Python

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(2, os.cpu_count() or 1)))

# The same examples on every run, and no deadline: a busy machine is not a failure.
settings.register_profile("project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def pytest_collection_finish():
    # What was imported by now stays to the end. A collection of garbage that looks through all of it takes about half a
    # second, and there are hundreds.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else libraries that look for leaks when Python ends report what they find


@pytest.fixture(scope="session")
def demo_model():
    """(model, tokenizer) of the demo model in float32."""
    from hf_paged.demo_model import load_demo_model

    return load_demo_model(progress=False)


def pytest_addoption(parser):
    parser.addoption("--update-tables", action="store_true", help="write the docs' tables that this run makes")


@pytest.fixture
def through_loop(monkeypatch):
    """Paged generate calls keep to the loop over the whole batch, where they would go through a batcher."""
    monkeypatch.setattr("hf_paged.generate.can_batch", lambda *args: False)


@pytest.fixture
def threads():
    """Sets torch's number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def instruction_set():
    """Chooses what the C library runs with, and puts the best one back."""
    from hf_paged_kernels import cpu

    yield cpu.use_instruction_set
    cpu.use_instruction_set(None)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 by 16, so that short sequences have many."""
    from hf_paged_kernels.triton import variants

    entry = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
    config = variants.config("default")
    tiles = {shape: {dtype: dict.fromkeys(pads, entry) for dtype, pads in dtypes.items()}
             for shape, dtypes in config["attend"].items()}  # fmt: skip
    monkeypatch.setattr(variants, "config", lambda arch: config | {"attend": tiles})
    variants.attend.cache_clear()
    yield
    variants.attend.cache_clear()
