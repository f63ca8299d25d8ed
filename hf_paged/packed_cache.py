"""The cache of a packed forward: every token of `[1, T]` goes to the slot of its own sequence.

Contract: `PackedPools` owns the K/V tensors of a batcher, one KVPool for each kind of layer, and says how many blocks
each may have. A `PackedCache` shows them to a model as an empty cache that takes T tokens; `update` writes them and
returns lazy tensors which the hf_paged attention recognises, or which gather the keys and values of all sequences,
one after the other, for models that transform them. Which layer a tensor belongs to is read from the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache_group import CacheGroup
from .config import PagedCacheConfig
from .kv_format import join, spell_layers
from .kv_pool import KVPool, MemoryBudget, PoolKey
from .lazy import LazyKV
from .packed_metadata import PackedGroup, PackedStep, PackingError


class LayerSpec(NamedTuple):
    """What one layer caches: the pool that it belongs to, and the dtypes of its keys and values."""

    key: PoolKey
    dtypes: tuple[torch.dtype, torch.dtype]


class PackedPools:
    """K/V tensors of all layers, and the groups of layers that share block tables.

    Args:
        specs: layer index -> LayerSpec, of the layers that keep keys and values.
        config: block size, number of blocks, share of the memory.
        max_num_seqs, chunk: sequences, and tokens of one in a step, that sliding-window layers must hold at most.
        kv_scales: as `KVPool` takes them.

    Attributes:
        specs: likewise, with the format that the config gives each layer.
    Raises:
        ValueError: the config names layers that keep no keys and values, or fixed scales do not fit.
        RuntimeError: the memory does not cover `config.num_blocks`.
    """

    def __init__(
        self,
        specs: Mapping[int, LayerSpec],
        config: PagedCacheConfig,
        max_num_seqs: int,
        chunk: int,
        kv_scales=None,
    ) -> None:
        config.formats.check_layers(specs)
        self.config, self.kv_scales = config, kv_scales
        self.specs = specs = {
            layer: spec._replace(key=spec.key._replace(format=config.formats.format_of(layer)))
            for layer, spec in specs.items()
        }
        self.budget = MemoryBudget(config.memory_fraction)
        keys = list(dict.fromkeys(spec.key for spec in specs.values()))
        self.pools = [KVPool(key, config, self.budget, kv_scales) for key in keys]
        self.group_of = {layer: keys.index(spec.key) for layer, spec in specs.items()}
        layers: list[list[int]] = [[] for _ in keys]
        for layer, index in self.group_of.items():
            layers[index].append(layer)
        self.bytes_per_block = [pool.block_bytes * len(mine) for pool, mine in zip(self.pools, layers, strict=True)]
        for pool, mine in zip(self.pools, layers, strict=True):
            for layer in mine:
                pool.add_layer(layer)
        self.groups = [
            CacheGroup(
                pool.manager,
                pool.key.sliding_window,
                config.num_blocks,
                pool.ensure_available if config.num_blocks is None else None,
            )
            for pool in self.pools
        ]
        if config.num_blocks is None:
            self._divide_budget(max_num_seqs, chunk)

    def _divide_budget(self, max_num_seqs: int, chunk: int) -> None:
        """Say how far each pool may grow, so that none takes what another needs."""
        for device in {pool.key.device for pool in self.pools}:
            here = [index for index, pool in enumerate(self.pools) if pool.key.device == device]
            left, shares = self.budget.available(device), sum(self.bytes_per_block[index] for index in here)
            # Layers with a window never need more than their windows; what they leave is for the others.
            for index in sorted(here, key=lambda index: self.groups[index].sliding_window == 0):
                group, size = self.groups[index], self.bytes_per_block[index]
                blocks = left // shares
                if group.sliding_window:
                    longest = group.sliding_window + chunk + group.manager.block_size
                    blocks = min(blocks, max_num_seqs * group.blocks_for(longest, chunk))
                group.max_blocks = self.pools[index].max_blocks = int(blocks)
                left -= blocks * size
                shares -= size

    @property
    def devices(self) -> list[torch.device]:
        """Where each group lies."""
        return [pool.key.device for pool in self.pools]

    @property
    def windows(self) -> list[int]:
        return [pool.key.sliding_window for pool in self.pools]

    def copy_blocks(self, pending: Sequence[dict[int, int]]) -> None:
        """Make the copies (destination -> source, for each group) that a scheduler asks for, and forget them."""
        for pool, copies in zip(self.pools, pending, strict=True):
            if copies:
                pool.copy_blocks([(source, destination) for destination, source in copies.items()])
                copies.clear()

    def content_key(self) -> tuple:
        """What else than tokens and weights the content of the blocks depends on; () where it is the model's own."""
        formats = self.config.formats
        if not formats.is_quantized:
            return ()
        kinds = (join(formats.kv_cache_dtype), join(formats.kv_scale_granularity), spell_layers(formats.skip_layers))
        return (*kinds, formats.rotate_keys, None if self.kv_scales is None else self.kv_scales.digest())

    def storages(self) -> Iterator[torch.Tensor]:
        """Every tensor that holds K/V."""
        for pool in self.pools:
            yield from pool.storages()


class PackedLayer(CacheLayerMixin):
    """One layer of a PackedCache; `window` is the sliding window, or None."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: PackedCache, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self._cache, self.layer_idx = cache, layer_idx
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
        spec = cache.pools.specs.get(layer_idx)
        self.spec = spec
        if spec is not None:
            self.group_index = cache.pools.group_of[layer_idx]
            self.pool = cache.pools.pools[self.group_index]
            self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write `key_states [1, num_kv_heads, T, head_dim_k]` and `value_states` to the slots of the step.

        Returns:
            Lazy keys and values `[1, num_kv_heads, sum of what each sequence's queries may see, head_dim]`.
        Raises:
            PackingError: the layer caches something else than when the model was admitted.
        """
        step, spec = self._cache.step, self.spec
        self._check(key_states, value_states)
        group = step.groups[self.group_index]
        dtype = spec.key.dtype
        self.pool.write(
            self.layer_idx,
            key_states[0].transpose(0, 1).to(dtype),
            value_states[0].transpose(0, 1).to(dtype),
            group.slot_mapping,
        )
        return self._lazy(0, key_states, group), self._lazy(1, value_states, group)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        step, spec = self._cache.step, self.spec
        if spec is None:
            raise PackingError(f"layer {self.layer_idx} kept no keys and values when the model was tried")
        key = spec.key
        for name, states, dim in (("keys", key_states, key.head_dim_k), ("values", value_states, key.head_dim_v)):
            expected = (1, key.num_kv_heads, step.num_tokens, dim)
            if tuple(states.shape) != expected or states.device != key.device:
                raise PackingError(
                    f"layer {self.layer_idx} caches {name} {tuple(states.shape)} on {states.device}, expected "
                    f"{expected} on {key.device}; make a new batcher if the model was moved or changed"
                )
            if torch.promote_types(states.dtype, key.dtype) != key.dtype:
                raise PackingError(
                    f"layer {self.layer_idx} caches {name} of {states.dtype}, this batcher keeps {key.dtype}; make a "
                    "new batcher after a change of the dtype"
                )

    def _lazy(self, which: int, states: torch.Tensor, group: PackedGroup) -> LazyKV:
        serial = group.step.serial

        def gather() -> torch.Tensor:
            if group.step.serial != serial or self._cache.step is not group.step:
                raise RuntimeError(f"keys and values of layer {self.layer_idx} were read after their forward had ended")
            self._cache.num_gathers += 1
            slots = torch.from_numpy(group.kv_slots())[None].to(states.device)
            dense = self.pool.gather(self.layer_idx, which, slots)
            return dense.to(self.spec.dtypes[which])

        shape = (1, states.shape[1], group.kv_ranges()[2], states.shape[3])
        return LazyKV(shape, self.spec.dtypes[which], states.device, self, group, gather)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + self._cache.shown_length, 0

    def get_seq_length(self) -> int:
        return self._cache.shown_length

    def get_max_length(self) -> int:
        return self.sliding_window if self.is_sliding else -1

    get_max_cache_shape = get_max_length


class PackedCache(Cache):
    """What a model sees of the pools in a packed forward.

    Args:
        pools: where keys and values go.
        windows: for each cache layer of the model its sliding window, or None.

    Attributes:
        step: the PackedStep of the forward that runs.
        shown_length: what it says it holds already. No right result depends on it: positions come as `position_ids`.
        num_gathers: how often a layer's keys or values were gathered.
    """

    def __init__(self, pools: PackedPools, windows: Sequence[int | None]) -> None:
        self.pools = pools
        self.step: PackedStep | None = None
        self.shown_length = self.num_gathers = 0
        super().__init__(layers=[PackedLayer(self, index, window) for index, window in enumerate(windows)])

    def __repr__(self) -> str:
        return f"PackedCache({len(self.layers)} layers in {len(self.pools.pools)} pools)"

    def storages(self) -> Iterator[torch.Tensor]:
        """Every tensor that holds K/V."""
        return self.pools.storages()

    def num_tokens_held(self) -> int:
        """Tokens of all running sequences, with those of the forward that runs."""
        if self.step is None:
            return 0
        running = len(self.step.batch.requests)
        return int(self.step.batch.num_computed[:running].sum()) + self.step.num_tokens

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise PackingError(f"the model caches a layer {layer_idx}, its config tells of {len(self.layers)}")
        return self.layers[layer_idx].update(key_states, value_states)
