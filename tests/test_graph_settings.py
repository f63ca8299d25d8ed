"""When decoding steps are captured, how a CUDA device is asked to, and what is noticed of a model that changes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from batcher_helpers import batcher, model_of
from tiny_models import build

from hf_paged import ContinuousBatcher, SchedulerConfig, graphs
from hf_paged.graphs import CudaCapture, capture_for, graph_sizes
from hf_paged.model_watch import ModelWatch


def test_settings():
    assert graph_sizes(SchedulerConfig(max_num_seqs=1)) == (1,)
    assert graph_sizes(SchedulerConfig(max_num_seqs=13)) == (1, 2, 4, 8, 13)
    assert graph_sizes(SchedulerConfig(max_num_seqs=32)) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(SchedulerConfig(max_num_seqs=300))[-3:] == (256, 288, 300)
    assert graph_sizes(SchedulerConfig(cuda_graph_sizes=[3, 5])) == (3, 5)
    for sizes in ((), (0, 1), (2, 1), (1, 1), (True,), (1, 2.0), (1, 257), "12", 4):
        with pytest.raises(ValueError, match="cuda_graph_sizes"):
            SchedulerConfig(cuda_graph_sizes=sizes)
    with pytest.raises(ValueError, match="of no use"):
        SchedulerConfig(cuda_graph_sizes=(1,), cuda_graphs=False)
    with pytest.raises(ValueError, match="cuda_graphs must be"):
        SchedulerConfig(cuda_graphs="yes")


def test_on_by_default_on_cuda_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: ("captures on", device))
    cuda, config = torch.device("cuda", 1), SchedulerConfig()
    assert capture_for(config, cuda) == ("captures on", cuda)
    assert capture_for(SchedulerConfig(cuda_graphs=True).for_device("cuda"), cuda) == ("captures on", cuda)
    assert capture_for(SchedulerConfig(cuda_graphs=False), cuda) is None
    assert capture_for(config, torch.device("cpu")) is None
    with batcher("llama_gqa") as one:
        assert one._engine.runner._graphs is None and one.stats().graph_steps == 0
    with pytest.raises(ValueError, match="cuda_graphs=True needs a model on a CUDA device, this one is on cpu"):
        ContinuousBatcher(model_of("llama_gqa"), scheduler_config={"cuda_graphs": True})


def test_the_order_in_which_cuda_captures(monkeypatch):
    """A side stream that waits for the current one, and is waited for; one pool for all graphs."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def inside(*args, **kwargs):
        names = [getattr(arg, "name", arg) for arg in (*args, *kwargs.values())]
        log.append(("enter", *names))
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "device", inside)
    monkeypatch.setattr(torch.cuda, "graph", inside)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {len(log)}")
    graph = SimpleNamespace(name="graph", replay=lambda: log.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    one = CudaCapture(torch.device("cuda", 0))
    one.warm_up(lambda: log.append("run"))
    assert log == ["side waits for current", ("enter", "side"), "run", "leave", "current waits for side"]
    log.clear()
    device = torch.device("cuda", 0)
    for _ in range(2):
        one.record(lambda: log.append("run"))()
    inner = [("enter", device), ("enter", "graph", "pool 1", "side", "thread_local"), "run", "leave", "leave", "replay"]
    assert log == inner * 2


def test_model_watch():
    model = build("llama_gqa")
    watch = ModelWatch(model)
    assert watch.is_unchanged(model) and ModelWatch.reason_against(model) is None
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert watch.is_unchanged(model)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    assert not watch.is_unchanged(model, thoroughly=False)
    watch = ModelWatch(model)
    model.model.layers = model.model.layers[:2]
    assert watch.is_unchanged(model, thoroughly=False) and not watch.is_unchanged(model)
    watch = ModelWatch(model)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not watch.is_unchanged(model, thoroughly=False)
    handle.remove()
    model.model.norm._disable_adapters = False
    assert "adapters in model.norm" in ModelWatch.reason_against(model)
    model.lm_head._hf_hook = object()
    assert "lm_head" in ModelWatch.reason_against(model) or "norm" in ModelWatch.reason_against(model)
