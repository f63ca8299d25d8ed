"""What the tests of noticing changes of weights share: a model's watch, and some changes."""

import torch
from tiny_models import prompts

from hf_paged.weights import WeightsWatch


def watched(model):
    """A watch that has seen the model."""
    watch = WeightsWatch(model)
    assert not watch.check_fingerprint()
    assert not watch.check() and not watch.check_fingerprint() and watch.epoch == 0
    return watch


def step(optimizer_class, **kwargs):
    def change(model):
        weight = model.model.layers[1].mlp.up_proj.weight
        optimizer = optimizer_class([weight], lr=1e-3, **kwargs)
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    return change


def q_proj(model):
    return model.model.layers[1].self_attn.q_proj


def in_place(model):
    with torch.no_grad():
        q_proj(model).weight[3, 5] += 1


def assert_steady(model, steps=20):
    """Steps of plain generation, checked one by one."""
    watch = watched(model)
    row, past = torch.tensor([prompts()[2]]), None
    with torch.no_grad():
        for _ in range(steps):
            out = model(row, past_key_values=past, use_cache=True)
            row, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            assert not watch.check()
    assert not watch.check_fingerprint() and watch.epoch == 0
