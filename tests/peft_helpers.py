"""Tiny models with adapters of PEFT, and plain generate with each adapter alone.

Contract: `wrapped` and `mixed_in` give the same adapters "x" (active) and "y" in the two ways that PEFT has; both
change the text. `alone` switches by the model's own methods and leaves the model as it was.
"""

import contextlib

import torch
from batcher_helpers import NEW, greedy, plain
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import assert_same_text, build

from hf_paged.adapters import BASE

LENGTHS = (5, 17, 33, 12, 3, 21)
NAMES = ("x", "y", BASE, None, "y", "x")
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**settings) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, lora_dropout=0.1, task_type="CAUSAL_LM", **settings)


def draw(model, seed: int = 3):
    """Random weights for every adapter, so that each one changes the text."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "ia3_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


def wrapped(family: str = "llama_gqa", **settings) -> PeftModel:
    """A PeftModel with adapters "x" and "y"; "x" is active, and trainable."""
    model = get_peft_model(build(family), lora(**settings), adapter_name="x")
    model.add_adapter("y", lora(**settings))
    return draw(model).eval()


def mixed_in(**settings):
    """A model of transformers that has loaded the same adapters itself."""
    model = build("llama_gqa")
    model.add_adapter(lora(**settings), adapter_name="x")
    model.add_adapter(lora(**settings), adapter_name="y")
    model.set_adapter("x")
    return draw(model).eval()


@contextlib.contextmanager
def alone(model, name: str | None):
    """One adapter alone is active, switched by the model's own methods; afterwards the model is as it was."""
    state = condition(model)
    with contextlib.ExitStack() as stack:
        if name == BASE and isinstance(model, PeftModel):
            stack.enter_context(model.disable_adapter())
        elif name == BASE:
            model.disable_adapters()
        elif name is not None:
            model.set_adapter(name)
        yield
    restore(model, state)


def text(model, name: str | None, prompt, new: int = NEW) -> list[int]:
    """New tokens of plain greedy generate with one adapter alone."""
    with alone(model, name):
        return plain(model, prompt, **greedy(new))


def condition(model) -> dict:
    """All that switching adapters might change."""
    layers = {
        name: {key: vars(layer).get(key) for key in ("_active_adapter", "_disable_adapters", "active_adapter")}
        for name, layer in model.named_modules()
    }
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    training = {name: module.training for name, module in model.named_modules()}
    return {"layers": layers, "gradients": gradients, "training": training}


def restore(model, state: dict) -> None:
    for name, layer in model.named_modules():
        for key, value in state["layers"][name].items():
            if key in vars(layer):
                setattr(layer, key, value) if key != "active_adapter" else vars(layer).update({key: value})
    for name, parameter in model.named_parameters():
        parameter.requires_grad = state["gradients"][name]
    assert condition(model) == state


def check_texts(model, rows, names, outputs, new: int = NEW) -> None:
    """Each output is the text that its adapter alone gives."""
    for row, name, output in zip(rows, names, outputs, strict=True):
        assert output.finish_reason == "length", output
        with alone(model, name):
            assert_same_text(model, row, list(output.output_token_ids), plain(model, row, **greedy(new)))


def add(one, rows, names) -> list[str]:
    pairs = zip(rows, names, strict=True)
    return [one.add_request(row, generation_config=greedy(), adapter_name=name) for row, name in pairs]


MODELS = {"wrapped": wrapped, "mixed_in": mixed_in}
