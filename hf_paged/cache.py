"""PagedCache: a transformers Cache whose attention layers keep their K/V in blocks.

Contract: every operation of a Cache leaves the same lengths, mask sizes and dense K/V as the installed
DynamicCache would, while memory is held in blocks that rows share. `update` returns lazy tensors: the
hf_paged attention reads the blocks in place, anything else gathers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from .config import PagedCacheConfig
from .kv_scales import for_cache
from .layer import CachePools, PagedLayer
from .rows import Rows
from .stats import CacheStats


class PagedCache(DynamicCache):
    """KV cache in fixed-size blocks, for any causal model of transformers.

    Full-attention and sliding-window layers keep their K/V in blocks; layers of other kinds (linear
    attention, mamba, shared or empty ones) keep transformers' own. Give it to a forward or to `generate`
    as `past_key_values`. `copy.deepcopy` (or `fork()`) shares all blocks and copies one only when either
    side writes into it.

    Args:
        config: the model's config.
        cache_config: PagedCacheConfig, a dict of its fields, or None.
    Raises:
        ValueError: `config` is no model config, or `cache_config` is wrong or does not fit it.
    """

    def __init__(self, config: PreTrainedConfig, cache_config: PagedCacheConfig | Mapping | None = None) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config must be a model's config (model.config), got {type(config).__name__}")
        self.cache_config = PagedCacheConfig.from_any(cache_config)
        self._pools = CachePools(self.cache_config, for_cache(self.cache_config, model_config=config))
        layers = [self._paged(layer, index) for index, layer in enumerate(DynamicCache(config=config).layers)]
        self.cache_config.formats.check_layers(
            index for index, layer in enumerate(layers) if isinstance(layer, PagedLayer)
        )
        Cache.__init__(self, layers=layers)
        self._config = config
        self.history = None  # the tokens that it holds, where `generate` has noted them

    def _paged(self, layer, layer_idx: int):
        # By exact type: a subclass holds more than keys and values.
        if type(layer) is DynamicLayer:
            return PagedLayer(self._pools, layer_idx)
        if type(layer) is DynamicSlidingWindowLayer:
            return PagedLayer(self._pools, layer_idx, layer.sliding_window)
        return layer

    def __repr__(self) -> str:
        kinds = Counter(type(layer).__name__ for layer in self.layers)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        length = max((layer.get_seq_length() for layer in self.paged_layers), default=0)
        size = self.cache_config.block_size
        return f"PagedCache({layers}; {self.num_rows} rows of {length} columns, block_size={size})"

    @property
    def paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first update."""
        return next((rows.num_rows for rows in self._pools.rows.values()), 0)

    @property
    def sees_every_column(self) -> bool:
        """Whether every layer can attend to any earlier column: no window, no recurrent state."""
        return all(type(layer) is PagedLayer and not layer.is_sliding for layer in self.layers)

    def _others(self) -> list:
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]

    def expect(self, attention_mask: torch.Tensor | None = None, shared_rows: int = 1) -> None:
        """Say what is known of the batch before the first token is written.

        Args:
            attention_mask: `[batch, columns]`; blocks that would hold only left padding are not kept. Other
                padding cannot be left out and is stored.
            shared_rows: rows come in runs of this many copies of one prompt, stored once while they agree.
        Raises:
            ValueError: the cache is not empty.
        """
        if self.get_seq_length() > 0:
            raise ValueError(f"expect() comes before the first token, this cache holds {self.get_seq_length()}")
        self._empty_rows()
        if attention_mask is not None:
            # Padding ends where the first real token stands, also when holes follow.
            real = attention_mask.bool()
            starts = torch.where(real.any(dim=1), real.int().argmax(dim=1), real.shape[1])
            self._pools.row_starts = starts.cpu().numpy().astype(np.int64)
            self._pools.expected_columns = real.shape[1]
        self._pools.shared_rows = shared_rows

    def fork(self) -> PagedCache:
        """Another cache with the same content, sharing every block until one side writes into it."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict) -> PagedCache:
        twin = PagedCache.__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._pools)] = self._pools.fork()
        for name, value in self.__dict__.items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a PagedCache cannot be pickled: its blocks may be shared with other caches; build a DynamicCache from "
            "its layers' keys and values, or copy.deepcopy() it within the process"
        )

    def offload(self, *args, **kwargs) -> None:
        raise NotImplementedError("offloading a PagedCache is not supported; its blocks stay on the model's device")

    prefetch = offload

    def __iter__(self) -> Iterator[tuple]:
        """Per layer: dense keys, dense values, and the window as a tensor or None."""
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    # Operations on the whole batch, once a pool

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end, with the values and errors of the installed DynamicCache.

        Raises:
            RuntimeError: a sliding-window layer no longer has the tokens that would come back into its window.
        """
        tokens_to_remove = int(tokens_to_remove)
        cuts: dict[Rows, tuple[dict[int, int], int]] = {}
        for layer in self.layers:  # in their order, so that the first to refuse is the same
            if not isinstance(layer, PagedLayer):
                layer.crop(tokens_to_remove)
                continue
            twin = layer.twin()
            if layer.rows is None:
                if tokens_to_remove > 0:  # still refused where the installed version refuses it
                    twin.crop(tokens_to_remove)
                continue
            twin.crop(tokens_to_remove)
            length, held = max(0, twin.get_seq_length()), twin.keys.shape[-2]
            if layer.is_sliding and held < min(length, layer.sliding_window - 1):
                raise RuntimeError(
                    f"crop({tokens_to_remove}) goes back to {length} tokens, and layer {layer.layer_idx} gave back "
                    f"what lies behind its window of {layer.sliding_window}; call activate_past_recording() earlier"
                )
            lengths, _ = cuts.setdefault(layer.rows, ({}, length - held))
            lengths[layer.layer_idx] = length
        for rows, (lengths, kept_from) in cuts.items():
            rows.crop(lengths, kept_from)
        self._trim_history()

    def cut(self, length: int) -> bool:
        """Cut every layer to `length` columns, layers of unequal length included; whether that was possible."""
        for rows in self._pools.rows.values():
            if rows.sliding_window and max(0, length - rows.sliding_window + 1) < rows.first_held():
                return False
        for rows in self._pools.rows.values():
            rows.crop({layer: min(length, held) for layer, held in rows.lengths.items()}, rows.first_held())
        self._trim_history()
        return True

    def _trim_history(self) -> None:
        length = self.get_seq_length()
        if self.history is not None and self.history.length > length:
            self.history = self.history.first(length)

    @property
    def knows_every_layer(self) -> bool:
        """Whether keys and values lie in paged layers alone: no indexed, compressed or combined layers beside them."""
        return all(isinstance(one, PagedLayer) or not isinstance(one, CacheLayerMixin) for one in self.layers)

    def reset(self) -> None:
        """Forget the content, as the installed DynamicCache does, and give the blocks back."""
        emptied = []
        for layer in self.paged_layers:
            twin = layer.twin()
            if twin.is_initialized:
                twin.keys = twin.values = torch.zeros(twin.keys.shape)
            twin.reset()
            if layer.rows is None or not twin.get_seq_length():
                emptied.append(layer)
        kept = {layer.rows for layer in self.paged_layers if layer not in emptied}
        for rows in kept:  # transformers 5.17 keeps the length of full-attention layers and zeroes them
            rows.zero()
        if kept:
            self._empty_layers([layer for layer in emptied if layer.rows not in kept])
        else:
            self._empty_rows()
        for layer in self._others():
            layer.reset()

    def clear(self) -> None:
        """Make the cache as new, whatever `reset` means to the installed transformers; the pools stay."""
        self._empty_rows()
        for index, fresh in enumerate(DynamicCache(config=self._config).layers):
            if not isinstance(self.layers[index], PagedLayer):
                self.layers[index] = fresh

    def _empty_rows(self) -> None:
        self._empty_layers(self.paged_layers)
        self._pools.row_starts, self._pools.shared_rows = None, 1

    def _empty_layers(self, layers: list[PagedLayer]) -> None:
        self.history = None
        for key, rows in list(self._pools.rows.items()):
            if not rows.lengths or any(layer.rows is rows for layer in layers):
                rows.clear()
                del self._pools.rows[key]
        for layer in layers:
            layer.forget()

    def _select(self, index: torch.Tensor) -> None:
        index = index.tolist()
        for rows in self._pools.rows.values():
            if rows.length > 0:
                rows.select(index)
        if self._pools.row_starts is not None:
            self._pools.row_starts = self._pools.row_starts[index]
        self._pools.shared_rows = 1
        if self.history is not None:
            self.history = self.history.select(index)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was; only block tables move."""
        self._select(beam_idx)
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share its blocks."""
        for rows in self._pools.rows.values():
            self._select(torch.arange(rows.num_rows).repeat_interleave(repeats))
            break
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` (integers or a bool mask) names."""
        for rows in self._pools.rows.values():
            chosen = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            self._select(torch.arange(rows.num_rows)[chosen])
            break
        for layer in self._others():
            layer.batch_select_indices(indices)

    # What it holds

    def storages(self) -> Iterator[torch.Tensor]:
        """Every tensor that holds K/V for this cache, other layers' states included."""
        for pool in self._pools.pools.values():
            yield from pool.storages()
        for layer in self._others():
            yield from _tensors(vars(layer))

    def stats(self) -> CacheStats:
        """Blocks, bytes and waste of this cache's pools as they are: blocks behind a window go with the next update."""
        total = CacheStats()
        for key, pool in self._pools.pools.items():
            rows = self._pools.rows.get(key)
            pool.collect()
            total += CacheStats.of(pool, rows)
        return total

    def check_integrity(self) -> None:
        """Assert that every pool is whole: free and held blocks add up, ref counts match the tables."""
        for pool in self._pools.pools.values():
            pool.collect()
            pool.manager.check_integrity()


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
