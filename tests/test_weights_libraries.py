"""Noticing changes of weights made by other libraries: PEFT's adapters, accelerate's offloading, quantised weights."""

import copy
import time

import pytest
import torch
from tiny_models import build
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from weights_helpers import assert_steady, q_proj, watched

# PEFT


@pytest.fixture
def lora():
    peft = pytest.importorskip("peft")

    def make(seed):
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")

    model = peft.get_peft_model(build("llama_gqa"), make(0), adapter_name="a")
    model.add_adapter("b", make(1))
    model.set_adapter("a")
    return model


def train_adapter(model):
    weight = q_proj(model.get_base_model()).lora_B["a"].weight
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def scale_adapter(model):
    q_proj(model.get_base_model()).set_scale("a", 3.0)


def add_adapter(model):
    model.add_adapter("c", copy.deepcopy(model.peft_config["a"]))


@pytest.mark.parametrize("root", ["peft", "base"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_adapter("b"),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.set_adapter(["a", "b"]),
        lambda model: model.delete_adapter("a"),
        scale_adapter,
        add_adapter,
        train_adapter,
    ],
    ids=["switched", "disabled", "merged", "both", "deleted", "scaled", "added", "trained"],
)
def test_adapters(lora, root, change):
    watch = watched(lora if root == "peft" else lora.get_base_model())
    change(lora)
    assert watch.check() and not watch.check()


def test_adapters_merged_there_and_back(lora):
    watch = watched(lora.get_base_model())
    lora.merge_adapter()
    assert watch.check()
    lora.unmerge_adapter()
    assert watch.check()
    with lora.disable_adapter():
        assert watch.check()
    assert watch.check()
    lora.merge_adapter(["a"])
    assert watch.check()
    lora.unmerge_adapter()
    lora.merge_adapter(["b"])
    assert watch.check()
    assert_steady(lora.get_base_model())


# accelerate


@pytest.fixture(params=["cpu", "disk"])
def offloaded(request, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build("llama_gqa", tie_word_embeddings=False)
    if request.param == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        return request.param, model, None
    accelerate.disk_offload(model, offload_dir=str(tmp_path), execution_device=torch.device("cpu"))
    return request.param, model, tmp_path


def test_offloaded_weights(offloaded):
    kind, model, folder = offloaded
    assert q_proj(model).weight.is_meta
    assert_steady(model, steps=4)
    watch = watched(model)
    source = q_proj(model)._hf_hook.hooks if hasattr(q_proj(model)._hf_hook, "hooks") else [q_proj(model)._hf_hook]
    weights = next(hook.weights_map for hook in source if getattr(hook, "weights_map", None) is not None)
    if kind == "cpu":
        weights["weight"].mul_(2)
        assert watch.check_fingerprint() and watch.epoch == 1
        weights["weight"].numpy()[0, 0] += 1
    else:
        file = next(folder.glob("*layers.1*q_proj*.dat"))
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        time.sleep(0.02)  # the clock of files ticks slowly
        file.write_bytes(content)
    assert not watch.check() and watch.check_fingerprint() and not watch.check_fingerprint()
    q_proj(model)._hf_hook.weights_map = {"weight": torch.ones(64, 64)}
    assert watch.check() and not watch.check()


# Quantised weights


class WithState(nn.Parameter):
    """Quantised as bitsandbytes does it: integers, and an object with the scales."""


class State:
    def __init__(self):
        self.absmax = torch.ones(3)


def quantised_models():
    two = nn.Linear(4, 4, bias=False)
    two.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    four_bit = nn.Linear(4, 4, bias=False)
    four_bit.weight = WithState(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    four_bit.weight.quant_state = State()
    buffers = nn.Module()
    buffers.register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    return {
        "subclass": (two, lambda: two.weight.b, lambda: two.weight),
        "state": (four_bit, lambda: four_bit.weight.quant_state.absmax, lambda: four_bit.weight.quant_state),
        "buffers": (buffers, lambda: buffers.qweight, None),
    }


@pytest.mark.parametrize("kind", ["subclass", "state", "buffers"])
def test_quantised_weights(kind):
    model, inner, _ = quantised_models()[kind]
    watch = watched(model)
    inner().detach().numpy()[...] += 1
    assert not watch.check() and watch.check_fingerprint()
    with torch.no_grad():
        inner().add_(1)
    assert watch.check() and not watch.check()


def test_dynamically_quantised_layer():
    torch_quantized = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    if not torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without quantised kernels")
    layer = torch_quantized.Linear(4, 4)
    model = nn.Sequential(layer)
    watch = watched(model)
    layer.set_weight_bias(torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), None)
    assert watch.check()
