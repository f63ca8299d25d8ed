"""What every test shares: quiet threads, no network, deterministic hypothesis, the demo model.

Contract: importing this module, before any test imports transformers or triton, switches the Hub offline and,
without a GPU, Triton to its interpreter.
`demo_model` is converted at most once on a machine (in the user's cache, or HF_PAGED_CACHE);
tests share it and must not change it.
"""

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
