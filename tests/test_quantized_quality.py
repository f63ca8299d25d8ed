"""What 8 bits do to the demo model's predictions: as much as rounding must, at any size of K and V, and no more.

The text is Python's own help, cut into windows of 256 tokens, one forward each, in float32. Every scored token's
attention reads what the blocks hold, its own chunk included. The simulation rounds keys and values inside a
DynamicCache, by torch's own casts, keys in the basis of a Hadamard matrix.
"""

import math
import pydoc_data.topics as help_texts
from contextlib import contextmanager

import pytest
import torch
from transformers.cache_utils import DynamicCache

import hf_paged

WINDOW = 256
QMAX = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
CAST = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


def windows(tokenizer, count):
    text = "\n".join(help_texts.topics[name] for name in sorted(help_texts.topics))
    ids = tokenizer(text[: count * WINDOW * 12], add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return ids[: count * WINDOW].view(count, WINDOW)


@contextmanager
def attending(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def rounded(x, dtype):
    """x as codes with a scale for each row leave it."""
    scale = (x.abs().amax(-1, keepdim=True) / QMAX[dtype]).clamp(min=2.0**-126)
    codes = (x / scale).clamp(-QMAX[dtype], QMAX[dtype])
    codes = codes.round() if dtype == "int8" else codes.to(CAST[dtype]).float()
    return codes * scale


def hadamard(size):
    """The orthogonal matrix with entries +-1 / sqrt(size)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(size.bit_length() - 1):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return (matrix / math.sqrt(size)).float()


class Simulation(DynamicCache):
    def __init__(self, config, dtype, rotate=True):
        super().__init__(config=config)
        self.rounding, self.rotation = dtype, hadamard(64) if rotate else torch.eye(64)

    def update(self, key, value, *args, **kwargs):
        key = rounded(key @ self.rotation, self.rounding) @ self.rotation.T
        return super().update(key, rounded(value, self.rounding), *args, **kwargs)


@torch.no_grad()
def logprobs(model, rows, make_cache):
    """`[windows, WINDOW, vocab]` of each window alone."""
    found = [model(row[None], past_key_values=make_cache(), use_cache=True).logits[0].log_softmax(-1) for row in rows]
    return torch.stack(found)


def paged(model, rows, **settings):
    with attending(model, "hf_paged"):
        return logprobs(model, rows, lambda: hf_paged.PagedCache(model.config, settings))


def perplexity(logprobs, rows):
    taken = logprobs[:, :-1].gather(-1, rows[:, 1:, None])
    return math.exp(-taken.mean())


def divergences(reference, other):
    """KL divergence of each token `[windows, WINDOW]`, nats; window by window, which takes less memory."""
    return torch.stack([(p.exp() * (p - q)).sum(-1) for p, q in zip(reference, other, strict=True)]).double()


def divergence(reference, other):
    """Its mean."""
    return float(divergences(reference, other).mean())


@pytest.fixture(scope="module")
def plain(demo_model):
    """The windows and what the model says of them with its own cache."""
    model, tokenizer = demo_model
    rows = windows(tokenizer, 6)
    return rows, logprobs(model, rows, lambda: DynamicCache(config=model.config))


def test_blocks_in_the_models_dtype_lose_nothing(demo_model, plain):
    rows, reference = plain
    assert divergence(reference[:1], paged(demo_model[0], rows[:1])) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "rotate", "most"),
    [("fp8_e4m3", True, 0.01), ("fp8_e4m3", False, 0.02), ("fp8_e5m2", True, 0.05), ("int8", True, 0.001)],
)
def test_loss_is_that_of_rounding(demo_model, plain, dtype, rotate, most):
    model, rows, reference = demo_model[0], *plain
    simulated = logprobs(model, rows, lambda: Simulation(model.config, dtype, rotate))
    ours = paged(model, rows, kv_cache_dtype=dtype, rotate_keys=None if rotate else False)
    expected, got = divergences(reference, simulated), divergences(reference, ours)
    # The last bits of float32 decide between two codes here and there, and after a few layers the two runs round
    # differently. A few tokens carry much of the mean, which so differs by some 4 % by chance: its own standard error
    # is allowed for. The typical token's divergence differs by 2 %.
    typical = float((got.clamp(min=1e-12).log() - expected.clamp(min=1e-12).log()).mean().exp())
    chance = 2 * float((got - expected).mean(1).std()) / len(rows) ** 0.5
    got, expected = float(got.mean()), float(expected.mean())
    assert abs(typical - 1) < 0.1, f"a typical token's KLD is {typical:.3f} times the simulated one"
    assert abs(got - expected) < 0.1 * expected + chance, (
        f"mean KLD {got:.5f}, simulated {expected:.5f} +- {chance:.5f}"
    )
    assert got < most
    assert abs(perplexity(ours, rows) / perplexity(simulated, rows) - 1) < 0.005


@pytest.mark.parametrize(("dtype", "most"), [("fp8_e4m3", 0.85), ("int8", 0.6)])
def test_rotated_keys_lose_less(demo_model, plain, dtype, most):
    model, rows, reference = demo_model[0], plain[0][:3], plain[1][:3]
    rotated = divergence(reference, paged(model, rows, kv_cache_dtype=dtype))
    as_they_come = divergence(reference, paged(model, rows, kv_cache_dtype=dtype, rotate_keys=False))
    assert rotated < most * as_they_come, f"mean KLD {rotated:.5f}, as they come {as_they_come:.5f}"


@contextmanager
def rescaled(model, side, factor):
    """Keys or values `factor` times as large, undone in the queries or in the output: the same function."""
    pairs = {"k": ("k_proj", "q_proj"), "v": ("v_proj", "o_proj")}[side]
    weights = [getattr(layer.self_attn, name).weight for layer in model.model.layers for name in pairs]
    kept = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight, change in zip(weights, (factor, 1 / factor) * len(model.model.layers), strict=True):
                weight.mul_(change)
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_size_of_keys_and_values_does_not_matter(demo_model, plain, side):
    model, rows = demo_model[0], plain[0][:2]
    usual = perplexity(paged(model, rows, kv_cache_dtype="fp8_e4m3"), rows)
    for factor in (64, 512, 1 / 4096, 5.3):
        with rescaled(model, side, factor):
            got = perplexity(paged(model, rows, kv_cache_dtype="fp8_e4m3"), rows)
        assert abs(got / usual - 1) < 0.005, f"{side} times {factor}: perplexity {got:.4f}, {usual:.4f} before"


def test_fixed_scales_of_other_text_come_near(demo_model, plain, tmp_path):
    """Scales of channels, measured on one part of the text, lose less on another than scales of its own tokens do (keys
    that are not rotated)."""
    model, tokenizer = demo_model
    rows, reference = plain[0][:2], plain[1][:2]
    path = tmp_path / "scales.safetensors"
    other = windows(tokenizer, 12)[8:].tolist()
    settings = {"kv_cache_dtype": "int8", "kv_scale_granularity": "k:per_channel,v:per_token_head"}
    hf_paged.calibrate_kv_scales(model, other, **settings, output=path, progress_bar=False)
    fixed = paged(model, rows, **settings, kv_scales=path)
    own = paged(model, rows, kv_cache_dtype="int8", rotate_keys=False)
    assert divergence(reference, fixed) < divergence(reference, own)
    assert abs(perplexity(fixed, rows) / perplexity(reference, rows) - 1) < 0.01
