"""The cache of a decoding step that torch.compile traces whole.

Contract: a `TracedCache` shows the pools of a PackedCache to a model while dynamo traces it. `update` writes through
the paged operators and returns, in place of keys and values, `PagedKV`: plain Python objects that name the layer whose
pages hold them. A model that only hands them on to its attention is traced whole, and the hf_paged attention reads the
pages; a model that computes with them cannot be traced, and is refused. So no tensor subclass, no thread-local and no
identity of a tensor is needed to find the layer, and a layer that reads the pages of another one finds the right ones.

The tensors of the step are attributes: to dynamo they are inputs of the graph, of dynamic size where a step's vary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .packed_cache import PackedCache, PackedLayer
from .packed_metadata import PackedStep, PackingError


class PagedKV:
    """Keys or values of one layer of a traced forward: no tensor, only where they lie.

    Attributes:
        layer: the TracedLayer that wrote them.
        which: 0 for keys, 1 for values.
    """

    def __init__(self, layer: TracedLayer, which: int) -> None:
        self.layer, self.which = layer, which

    def pages(self, value) -> tuple:
        """What `TracedLayer.pages` gives, and the sliding window.

        Raises:
            PackingError: `value` is not what was cached with these keys.
        """
        layer = self.layer
        if not isinstance(value, PagedKV) or value.layer is not layer or (self.which, value.which) != (0, 1):
            raise PackingError(f"the values beside the keys of layer {layer.layer_idx} are not those that it cached")
        if layer.window is None:
            raise PackingError(f"nothing read layer {layer.layer_idx} when the model was tried")
        return *layer.pages(), layer.window

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[..., head_dim_k]` as the pages want them."""
        return self.layer.pool.pages(self.layer.layer_idx).queries(query)

    def to(self, device: torch.device) -> PagedKV:
        """Itself: layers that read what another one keeps ask for it on their own device."""
        if device != self.layer.device:
            raise PackingError(f"keys and values of layer {self.layer.layer_idx} are wanted on {device}")
        return self


class TracedLayer(CacheLayerMixin):
    """One layer of a TracedCache.

    Args:
        cache: the cache that it belongs to.
        packed: the layer of the PackedCache whose pages it shows.
        window: tokens that a query of the attention that reads it sees, 0 for all; None if nothing reads it.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: TracedCache, packed: PackedLayer, window: int | None) -> None:
        super().__init__()
        self._cache, self.layer_idx, self.window = cache, packed.layer_idx, window
        self.is_sliding = packed.is_sliding
        if packed.is_sliding:
            self.sliding_window = packed.sliding_window
        self.is_initialized = True
        self.spec = packed.spec
        if packed.spec is not None:
            self.pool, self.group_index = packed.pool, packed.group_index
            self.dtype, self.device = packed.spec.key.dtype, packed.spec.key.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write `key_states [1, num_kv_heads, T, head_dim_k]` and `value_states` to the slots of the step."""
        if self.spec is None or (key_states.dtype, value_states.dtype) != self.spec.dtypes:
            raise PackingError(f"layer {self.layer_idx} caches something else than when the model was tried")
        self.pool.write(
            self.layer_idx,
            key_states[0].transpose(0, 1).to(self.dtype),
            value_states[0].transpose(0, 1).to(self.dtype),
            self._cache.slot_mappings[self.group_index],
        )
        return PagedKV(self, 0), PagedKV(self, 1)

    def pages(self) -> tuple[torch.Tensor, ...]:
        """Both caches, their scales, block tables `[S, max_blocks]` and lengths `[S]` of the step."""
        pages, index = self.pool.pages(self.layer_idx), self.group_index
        caches = pages.key_cache, pages.value_cache, pages.k_scale, pages.v_scale
        return *caches, self._cache.tables[index], self._cache.lens[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No key at all, which the hf_paged mask function takes as the sign that no mask is wanted."""
        return 0, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.sliding_window if self.is_sliding else -1

    get_max_cache_shape = get_max_length


class TracedCache(Cache):
    """What a model sees of the pools while it is traced, and when the trace runs.

    Args:
        packed: the cache of the same pools for forwards that are not compiled.
        windows: layer -> window of the attention that reads it.

    Attributes:
        slot_mappings, tables, lens: for each group of layers the tensors of the step, as in `PackedGroup`.
    """

    def __init__(self, packed: PackedCache, windows: Mapping[int, int]) -> None:
        self.pools = packed.pools
        self.slot_mappings: list[torch.Tensor] = []
        self.tables: list[torch.Tensor] = []
        self.lens: list[torch.Tensor] = []
        super().__init__(
            layers=[TracedLayer(self, layer, windows.get(index)) for index, layer in enumerate(packed.layers)]
        )

    def load(self, step: PackedStep) -> None:
        """Take the tensors of a step without chunks."""
        self.slot_mappings = [group.slot_mapping for group in step.groups]
        self.tables = [group.decode_tables for group in step.groups]
        self.lens = [group.decode_lens for group in step.groups]

    def clear(self) -> None:
        """Let go of the tensors of the last step."""
        self.slot_mappings, self.tables, self.lens = [], [], []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)
