"""A PagedCache beside the installed DynamicCache, both fed the same random keys and values.

Contract: `Pair` applies every operation to both caches and asserts that what they return and hold is the same,
bit for bit. What it has fed is kept, so that an oracle of a shorter text can be made anew.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged import PagedCache, PagedLayer

WINDOW = 8
# transformers 5.17 zeroes its tensors and keeps their length.
RESET_FORGETS = "reset" in vars(DynamicLayer)
FULL, SLIDING = "full_attention", "sliding_attention"
_BASE = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    head_dim=8,
)
_SETTINGS = {
    "llama": dict(),
    "mistral": dict(sliding_window=WINDOW),
    "gemma3_text": dict(sliding_window=WINDOW, layer_types=[SLIDING, SLIDING, FULL]),
    "gemma3n_text": dict(  # the last three layers share the K/V of earlier ones
        sliding_window=WINDOW,
        num_hidden_layers=6,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        num_kv_shared_layers=3,
        intermediate_size=[48] * 6,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "qwen3_next": dict(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2),  # 3 linear, 1 full
    "deepseek_v3": dict(num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, n_routed_experts=4),
}
FAMILIES = [*_SETTINGS, "gpt2"]
# (num_kv_heads, head_dim_k, head_dim_v) of the random K/V; MLA models hand over V of another size than K.
_SHAPES = {"deepseek_v3": (4, 6, 3), "gpt2": (4, 5, 5)}


def config_of(family: str):
    """A small config of this model type."""
    if family == "gpt2":
        return CONFIG_MAPPING["gpt2"](vocab_size=99, n_embd=32, n_layer=3, n_head=4)
    return CONFIG_MAPPING[family](**{**_BASE, **_SETTINGS[family]})


def random_kv(batch: int, tokens: int, shape=(2, 4, 4), dtype=torch.float32, generator=None):
    """Keys `[batch, num_kv_heads, tokens, head_dim_k]` and values likewise."""
    heads, dim_k, dim_v = shape
    key = torch.randn(batch, heads, tokens, dim_k, generator=generator)
    value = torch.randn(batch, heads, tokens, dim_v, generator=generator)
    return key.to(dtype), value.to(dtype)


def outcome(operation, *args) -> type[Exception] | None:
    """The type of the exception that an operation raises, or None."""
    try:
        operation(*args)
    except Exception as error:
        return type(error)
    return None


class Pair:
    """A PagedCache (`paged`) and a DynamicCache (`dynamic`) of one config.

    Args:
        family: name of the config.
        batch: rows of the K/V that `update` makes up.
        shape: num_kv_heads, head_dim_k, head_dim_v; None for the family's.
        cache_config: settings of the PagedCache.
    """

    def __init__(self, family, batch=2, shape=None, dtype=torch.float32, seed=0, **cache_config) -> None:
        self.config, self.batch, self.dtype = config_of(family), batch, dtype
        self.shape = shape or _SHAPES.get(family, (2, 4, 4))
        self.generator = torch.Generator().manual_seed(seed)
        self.paged = PagedCache(self.config, cache_config)
        self.dynamic = DynamicCache(config=self.config)
        layers = list(enumerate(self.dynamic.layers))
        self.attention = [i for i, layer in layers if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)]
        self.linear = [i for i, layer in layers if hasattr(layer, "update_conv_state")]
        self.fed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # per layer, all K/V since the last reset

    def same(self, mine: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether a tensor of the PagedCache is that of the oracle."""
        return torch.equal(mine, other)

    @property
    def length(self) -> int:
        return self.paged.get_seq_length(self.attention[-1])

    def update(self, tokens: int) -> None:
        """Feed both caches a step of `tokens` random tokens a row and compare what they return."""
        for index in self.linear:
            state = torch.randn(self.batch, 3, 4, generator=self.generator)
            for cache in (self.paged, self.dynamic):
                cache.update_conv_state(state, index)
                cache.update_recurrent_state(state, index)
        for index in self.attention:
            new = random_kv(self.batch, tokens, self.shape, self.dtype, self.generator)
            kv_length, kv_offset = self.dynamic.get_mask_sizes(tokens, index)
            assert self.paged.get_mask_sizes(tokens, index) == (kv_length, kv_offset)
            expected = [states.clone() for states in new]
            held = self.paged.update(*new, index)  # first: where it raises, neither cache has the tokens
            for mine, other in zip(held, self.dynamic.update(*expected, index), strict=True):
                # 5.17 returns more than the mask covers while it records the past.
                other = other[:, :, other.shape[2] - kv_length :]
                assert (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device)
                assert self.same(mine + 0, other)
            old = self.fed.get(index)
            self.fed[index] = new if old is None else tuple(torch.cat(both, 2) for both in zip(old, new, strict=True))

    def refuse(self, tokens: int, message: str) -> None:
        """The PagedCache has no room for a step of `tokens` tokens, says so, and stays as it was in every layer."""
        dynamic, fed = copy.deepcopy(self.dynamic), dict(self.fed)
        with pytest.raises(RuntimeError, match=message):
            self.update(tokens)
        self.dynamic, self.fed = dynamic, fed
        self.check()

    def check(self) -> None:
        """Both caches answer every question the same way, and the blocks add up."""
        paged, dynamic = self.paged, self.dynamic
        assert len(paged) == len(dynamic)
        for name in ("is_sliding", "is_linear", "is_croppable", "is_initialized"):
            assert getattr(paged, name) == getattr(dynamic, name), name
        assert getattr(paged, "is_dummy", None) == getattr(dynamic, "is_dummy", None)
        assert not paged.is_compileable
        assert paged.get_max_length() == dynamic.get_max_length()
        assert paged.get_seq_length() == dynamic.get_seq_length()
        for index in self.attention:
            mine, other = paged.layers[index], dynamic.layers[index]
            assert isinstance(mine, PagedLayer)
            assert mine.get_max_length() == other.get_max_length()
            assert mine.is_initialized == other.is_initialized
            assert f"PagedLayer(length={other.get_seq_length()}" in repr(mine)
            for query_length in (1, 2, WINDOW, WINDOW + 1, 40):
                sizes = dynamic.get_mask_sizes(query_length, index)
                assert paged.get_mask_sizes(query_length, index) == sizes
        self.check_held()
        if not self.linear:  # no cache with linear attention can be iterated over
            for (key, value, window), layer, (*_, expected) in zip(paged, paged.layers, dynamic, strict=True):
                assert (window is None) == (expected is None) and (window is None or torch.equal(window, expected))
                assert (key is None) == (layer.keys is None) == (value is None)
                assert key is None or (torch.equal(key, layer.keys) and torch.equal(value, layer.values))
        paged.check_integrity()

    def check_held(self) -> None:
        """Both caches have the same lengths and hold the same K/V."""
        for index in self.attention:
            mine, other = self.paged.layers[index], self.dynamic.layers[index]
            assert mine.get_seq_length() == other.get_seq_length() == self.paged.get_seq_length(index)
            if other.keys is None:
                assert mine.keys is None and mine.values is None
            elif other.keys.dim() == 1:  # initialised, never fed
                assert mine.keys.numel() == mine.values.numel() == 0
            else:
                assert self.same(mine.keys, other.keys) and self.same(mine.values, other.values)

    def both(self, name: str, *args) -> None:
        """Call one method of both caches."""
        getattr(self.dynamic, name)(*args)
        getattr(self.paged, name)(*args)

    def take_rows(self, name: str, argument, index: torch.Tensor) -> None:
        """Call a method after which row i is what row `index[i]` was; an empty cache has no rows to move."""
        empty = self.length == 0
        self.both(name, argument)
        if not empty:
            self.fed = {i: (key[index], value[index]) for i, (key, value) in self.fed.items()}
            self.batch = len(index)

    def fork(self) -> Pair:
        """A deep copy of both caches; the PagedCache's shares its blocks."""
        twin = copy.copy(self)
        twin.generator = torch.Generator().manual_seed(self.generator.initial_seed() + 1)
        twin.paged, twin.dynamic = copy.deepcopy(self.paged), copy.deepcopy(self.dynamic)
        twin.fed, twin.attention = dict(self.fed), list(self.attention)
        return twin

    def trim(self, length: int) -> None:
        """Note that only the first `length` tokens are left."""
        self.fed = {i: (key[:, :, :length], value[:, :, :length]) for i, (key, value) in self.fed.items()}

    def restart_oracle(self) -> None:
        """Put a new DynamicCache, fed only the tokens that are left, in the old one's place."""
        recording = any(layer.record_past for layer in self.paged.paged_layers)
        self.dynamic = DynamicCache(config=self.config)
        for index, states in self.fed.items():
            self.dynamic.update(*states, index)
        if recording:
            self.dynamic.activate_past_recording()
