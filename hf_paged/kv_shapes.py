"""What each layer of a model caches, known from the model's config alone.

Contract: `kv_shapes(config)` gives one `KVShape` for every layer that keeps keys and values, as the installed
transformers caches them: grouped and single heads, windows, latents (MLA), head sizes that differ between layers;
layers that hold a recurrent state alone, or read what another layer keeps, have none. The shapes are seen, not
computed: the model is made without memory (on torch's meta device) and fed two tokens. Names of config fields are
read only where a model does not run so. The config stays as it was; no weight is read.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_heads")
_MOST_KNOWN = 32
_known: dict[tuple[type, str], tuple[KVShape, ...]] = {}


class KVShape(NamedTuple):
    """Keys and values of one layer and token: `[num_kv_heads, head_dim_k]` and `[num_kv_heads, head_dim_v]`.

    `sliding_window` is the number of tokens that a query sees, itself included; 0 means all. `in_blocks` is False
    where the layer keeps a recurrent state beside them, which leaves its keys and values to transformers' own cache.
    """

    layer_idx: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    sliding_window: int
    in_blocks: bool = True


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the decoder, of composite ones, too.

    Raises:
        ValueError: the model is an encoder-decoder, or `config` is no config.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config must be a model's config (model.config), got {type(config).__name__}")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; only decoders are supported here")
    return config.get_text_config(decoder=True)


def layers_with_kv(config: PreTrainedConfig) -> tuple[int, ...]:
    """Numbers of the layers whose keys and values a PagedCache keeps in blocks."""
    layers = DynamicCache(config=text_config(config)).layers
    return tuple(index for index, layer in enumerate(layers) if _in_blocks(layer))


def kv_shapes(config: PreTrainedConfig) -> tuple[KVShape, ...]:
    """Shapes of the layers that keep keys and values, in the order of the layers.

    Raises:
        ValueError: the config does not tell them.
    """
    text = text_config(config)
    key = (type(text), text.to_json_string(use_diff=False))
    if key not in _known:
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = _kv_shapes(text)
    return _known[key]


def _kv_shapes(text: PreTrainedConfig) -> tuple[KVShape, ...]:
    seen = _seen(text)
    shapes = []
    for index, layer in enumerate(DynamicCache(config=text).layers):
        if not isinstance(layer, DynamicLayer) or (seen is not None and index not in seen):
            continue
        shape = _named(text) if seen is None else seen[index]
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
        shapes.append(KVShape(index, *shape, window, _in_blocks(layer)))
    return tuple(shapes)


def _in_blocks(layer) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


class _Recorder(DynamicCache):
    """A cache that notes the shapes of what it is given."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.seen[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _seen(text: PreTrainedConfig) -> dict[int, tuple[int, int, int]] | None:
    """layer -> (num_kv_heads, head_dim_k, head_dim_v) of a forward on the meta device; None where that fails."""
    config = copy.deepcopy(text)
    mapped = type(config) in AutoModelForCausalLM._model_mapping
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # which fast kernels are missing does not matter here
    try:
        with torch.device("meta"), torch.no_grad():
            model = (AutoModelForCausalLM if mapped else AutoModel).from_config(config, **options).eval()
            cache = _Recorder(config)
            ids = torch.zeros((1, 2), dtype=torch.long)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    except Exception:  # whatever a model does that has no meaning without values: names have to do
        return None
    finally:
        logging.set_verbosity(verbosity)
    return cache.seen


def _named(text: PreTrainedConfig) -> tuple[int, int, int]:
    """Heads and head size by the usual names of a config's fields."""
    heads = next((value for name in _HEADS if isinstance(value := getattr(text, name, None), int)), None)
    if getattr(text, "multi_query", False) is True and not getattr(text, "new_decoder_architecture", False):
        heads = 1
    head_dim = getattr(text, "head_dim", None)
    queries, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(head_dim, int) and isinstance(queries, int) and isinstance(hidden, int):
        head_dim = hidden // queries
    if getattr(text, "kv_lora_rank", None) or heads is None or not isinstance(head_dim, int):
        raise ValueError(f"the config of {text.model_type} does not tell how many KV heads of what size a layer caches")
    return heads, head_dim, head_dim
