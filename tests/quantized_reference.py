"""A contiguous cache of 8-bit keys and values, and what plain transformers generates over it: the oracle of 8-bit
blocks.

Contract: a `QuantizedCache` is the installed DynamicCache but for one thing: new keys and values are quantised and
dequantised, each token and head by its own scale or by fixed ones, keys rotated where the settings say so, before they
are stored, so that attention, the current chunk's too, reads what 8 bits kept of them. No block, no slot and no kernel
is involved. `text` is greedy generate over one prompt.

Texts are compared in float64, token for token. In float32 two orders of summing round a number to two neighbouring
codes now and then, a step of up to an eighth: `TIE` is more than such a step ever changed a logit of these models by.
"""

from __future__ import annotations

import functools

import torch
from tiny_models import VOCAB, build
from transformers import DynamicCache

import hf_paged_kernels as kernels
from hf_paged import KVScales, PagedCacheConfig

TIE = 0.15
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
# Every format alone, keys and values apart, one side alone, and layers that differ.
SETTINGS = {
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8": {"kv_cache_dtype": "int8"},
    "mixed": {"kv_cache_dtype": "k:int8,v:fp8_e4m3"},
    "values_alone": {"kv_cache_dtype": {"v": "fp8_e5m2"}},
    "keys_alone": {"kv_cache_dtype": "k:int8"},
    "skip": {"kv_cache_dtype": "fp8_e4m3", "skip_layers": (0,)},
    "by_layer": {"kv_cache_dtype": "int8", "skip_layers": {0: "fp8_e5m2", 2: "k:auto,v:int8"}},
    "as_they_come": {"kv_cache_dtype": "fp8_e4m3", "rotate_keys": False},
}


def butterflies(states: torch.Tensor) -> torch.Tensor:
    """Each row times the Hadamard matrix of +1 and -1; of equal parts of it where its size is no power of two."""
    size = states.shape[-1]
    width = 1
    while size % (2 * width) == 0:
        pairs = states.reshape(*states.shape[:-1], -1, 2, width)
        sums, differences = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        states = torch.stack([sums, differences], dim=-2).reshape(states.shape)
        width *= 2
    return states


def rotated_and_back(keys: torch.Tensor, name: str) -> torch.Tensor:
    """What 8 bits keep of keys that are rotated for it."""
    bits = (keys.shape[-1] & -keys.shape[-1]).bit_length() - 1
    wide = torch.promote_types(keys.dtype, torch.float32)
    rotated = butterflies(keys.to(wide)) * 2.0 ** -((bits + 1) // 2)  # scales of a power of two are exact
    return (butterflies(read_back(rotated, name)) * 2.0 ** -(bits // 2)).to(keys.dtype)


def read_back(states: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What 8 bits keep of `states [batch, num_kv_heads, T, head_dim]`, by a scale for each row, or by a fixed one."""
    if name == "auto":
        return states
    if scale is None:
        scale = kernels.dynamic_scale(states, DTYPES[name])[..., None]
    elif scale.dim():
        scale = scale.reshape(scale.shape[0], 1, -1)  # of each head, or of each channel
    return kernels.dequantize(kernels.quantize(states, scale, DTYPES[name]), scale, states.dtype)


class QuantizedCache(DynamicCache):
    """A DynamicCache that keeps what 8 bits keep of its keys and values.

    Args:
        config: the model's.
        settings: of a PagedCacheConfig; those of its formats count.
    """

    def __init__(self, config, **settings) -> None:
        super().__init__(config=config)
        cache_config = PagedCacheConfig(**settings)
        self.formats = cache_config.formats
        self.fixed = None if cache_config.kv_scales is None else KVScales.load(cache_config.kv_scales)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        kept = self.formats.format_of(layer_idx)
        fixed = self.fixed.layer(layer_idx) if kept.is_static else (None, None)
        if kept.rotates_keys:
            key_states = rotated_and_back(key_states, kept.key_dtype)
        else:
            key_states = read_back(key_states, kept.key_dtype, fixed[0])
        value_states = read_back(value_states, kept.value_dtype, fixed[1])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def text(model, prompt, settings: dict, new: int = 12, **options) -> list[int]:
    """New tokens of plain greedy generate for one prompt alone over a `QuantizedCache`."""
    ids = torch.tensor([list(prompt)])
    cache = QuantizedCache(model.config, **settings)
    with torch.no_grad():
        out = model.generate(
            *(ids,),
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            **options,
        )
    return out[0, len(prompt) :].tolist()


# torch multiplies experts' matrices in float32 and below alone.
_CHANGES = {"deepseek_v3": {"first_k_dense_replace": 3}}


@functools.cache
def double(name: str):
    """A family's model in float64, one for all tests."""
    return build(name, dtype=torch.float64, **_CHANGES.get(name, {}))


@functools.cache
def single(name: str):
    """The same model in float32."""
    return build(name, **_CHANGES.get(name, {}))


@functools.cache
def _known(name: str, prompt: tuple[int, ...], setting: str, new: int) -> list[int]:
    return text(double(name), prompt, SETTINGS[setting], new)


def reference(name: str, prompt, setting: str, new: int = 12) -> list[int]:
    """`text` of a family in float64 and one of SETTINGS; kept for other tests."""
    return _known(name, tuple(prompt), setting, new)


def logits_over(model, tokens, settings: dict | None) -> torch.Tensor:
    """Logits `[tokens, vocab]` of plain transformers, one pass; over 8 bits unless settings are None."""
    cache = DynamicCache(config=model.config) if settings is None else QuantizedCache(model.config, **settings)
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0]


def same_text(name: str, prompt, got, setting: str, tie: float = TIE) -> None:
    """Fail unless `got` is the reference's text, or parts from it where its two best logits tie."""
    want = reference(name, prompt, setting, len(got))
    step = next((i for i, (mine, right) in enumerate(zip(got, want, strict=True)) if mine != right), None)
    if step is None:
        return
    logits = logits_over(double(name), [*prompt, *want[:step]], SETTINGS[setting])
    best, second = logits[-1].topk(2).values.tolist()
    assert best - second < tie, f"token {step} is {got[step]}, expected {want[step]} (gap {best - second:.4f})"


def scaled_keys(name: str, factor: float):
    """A model of a family whose keys are `factor` times as large and its queries as much smaller, in every layer."""
    model = build(name)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(factor)
            layer.self_attn.q_proj.weight.div_(factor)
    return model


def random_text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
