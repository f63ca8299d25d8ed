"""What a cache format does to the keys and values of each layer, apart from what follows from it.

Contract: keys and values of a text come from the plain model (its own cache); each layer's are written to a PagedCache
of the candidate and read back. So every layer gets the keys and values that it would without quantisation, and errors
do not add up from layer to layer. Only public names are used: what is measured is what a user's cache would hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache

from hf_paged import PagedCache, PagedCacheConfig


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer.

    Attributes:
        layer: index of the cache layer.
        key, value: ||read - written|| / ||written||, Frobenius norms over all tokens and heads.
        key_max, value_max: largest absolute error over the largest absolute value.
    """

    layer: int
    key: float
    value: float
    key_max: float
    value_max: float

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class CacheMeasure:
    """
    Attributes:
        layers: errors of each layer that keeps keys and values.
        bytes_per_token: of the candidate's pools, scales included, over all layers.
        baseline_bytes_per_token: of the model's own dtype in blocks of the same size.
        num_tokens: tokens that were looked at.
    """

    layers: tuple[LayerError, ...]
    bytes_per_token: float
    baseline_bytes_per_token: float
    num_tokens: int

    def to_dict(self) -> dict:
        return asdict(self) | {"layers": [layer.to_dict() for layer in self.layers]}

    def worst(self, count: int) -> tuple[int, ...]:
        """The layers with the largest errors, keys and values together, in order."""
        ranked = sorted(self.layers, key=lambda layer: math.hypot(layer.key, layer.value), reverse=True)
        return tuple(sorted(layer.layer for layer in ranked[:count]))


def measure_cache(
    model: Any,
    documents: Sequence[Sequence[int]],
    cache_config: PagedCacheConfig | Mapping | None,
    max_tokens: int = 512,
) -> CacheMeasure:
    """Errors and bytes of a cache format on the longest document's first tokens.

    Args:
        model: a decoder-only model of transformers.
        documents: token ids.
        cache_config: the candidate.
        max_tokens: of the document, rounded down to whole blocks where it has as many.
    Raises:
        ValueError: there is no document, or the model keeps no keys and values.
    """
    longest = max(documents, key=len, default=())
    if not len(longest):
        raise ValueError("there is no document to measure a cache with")
    candidate = PagedCacheConfig.from_any(cache_config)
    count = min(len(longest), max_tokens)
    count = max(count - count % candidate.block_size, min(count, candidate.block_size))
    ids = torch.tensor([list(longest[:count])], device=model.device)
    with torch.no_grad():
        plain = DynamicCache(config=model.config.get_text_config(decoder=True))
        model(input_ids=ids, past_key_values=plain, use_cache=True, logits_to_keep=1)
    states = {index: pair for index, layer in enumerate(plain.layers) if (pair := _states(layer)) is not None}
    if not states:
        raise ValueError(f"{type(model).__name__} keeps no keys and values that could be measured")
    read, num_bytes = _through(model, candidate, states)
    own = {"block_size": candidate.block_size, "memory_fraction": candidate.memory_fraction}
    _, own_bytes = _through(model, PagedCacheConfig(**own), states)
    layers = []
    for index, written in states.items():
        (key, key_max), (value, value_max) = (_error(*pair) for pair in zip(written, read[index], strict=True))
        layers.append(LayerError(index, key, value, key_max, value_max))
    return CacheMeasure(tuple(layers), num_bytes, own_bytes, count)


def _states(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a cache layer, or None for one of another kind."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
        return None
    return keys, values


def _through(model: Any, config: PagedCacheConfig, states: Mapping) -> tuple[dict[int, tuple], float]:
    """Write states to a new cache and read them back; also the bytes that one token takes."""
    cache = PagedCache(model.config, cache_config=config)
    read = {}
    with torch.no_grad():
        for index, (keys, values) in states.items():
            lazy = cache.update(keys, values, index)
            read[index] = tuple(tensor.clone() for tensor in lazy)
        stats = cache.stats()
    held = max(keys.shape[2] for keys, _ in states.values())
    blocks = -(-held // config.block_size)
    return read, stats.bytes_held / (blocks * config.block_size)


def _error(written: torch.Tensor, read: torch.Tensor) -> tuple[float, float]:
    written, read = written[:, :, -read.shape[2] :].double(), read[:, :, -written.shape[2] :].double()
    difference = read - written
    size, largest = float(written.norm()), float(written.abs().max())
    return _share(float(difference.norm()), size), _share(float(difference.abs().max()), largest)


def _share(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else math.inf)
