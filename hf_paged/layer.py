"""PagedLayer: keys and values of one attention layer, in blocks.

Contract: `update` stores new tokens and returns lazy tensors with the shapes that `get_mask_sizes` announces;
lengths, mask sizes and dense K/V are those of the installed DynamicLayer or DynamicSlidingWindowLayer, the K/V as the
blocks hold them: where they are kept in 8 bits, new tokens too are read as they were stored. The layers of one cache
share `CachePools`, and those of one shape and format share rows.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from .config import PagedCacheConfig
from .kv_pool import KVPool, MemoryBudget, PoolKey
from .lazy import LazyKV
from .rows import Rows

logger = logging.get_logger(__name__)


class CachePools:
    """What the layers of one cache share: its pools, their rows, and what is known of the batch.

    Args:
        config: the cache's settings.
        kv_scales: as `KVPool` takes them.
    """

    def __init__(self, config: PagedCacheConfig, kv_scales=None) -> None:
        self.config, self.kv_scales = config, kv_scales
        self.budget = MemoryBudget(config.memory_fraction)
        self.rows: dict[PoolKey, Rows] = {}
        self.pools: dict[PoolKey, KVPool] = {}
        self.row_starts: np.ndarray | None = None  # left padding of each row, known before it is written
        self.expected_columns = 0  # of the prompt whose padding that is
        self.shared_rows = 1
        self.record_past = False
        self.layers_like: Counter[tuple] = Counter()  # layers that the cache has, by their window and format

    def join(self, layer_idx: int, key: PoolKey, num_rows: int, num_columns: int) -> Rows:
        """The rows that a layer of this shape belongs to, made at its first K/V."""
        rows = self.rows.get(key)
        if rows is None or not rows.lengths:  # rows without a layer are left from a forward that did not fit
            starts = self.row_starts
            # A model that puts columns of its own before the prompt (prompt tuning) is not what was expected.
            if starts is None or len(starts) != num_rows or num_columns > self.expected_columns:
                self.row_starts = None
                starts = np.zeros(num_rows, dtype=np.int64)
            pool = self.pools.get(key)
            if pool is None:
                pool = self.pools[key] = KVPool(key, self.config, self.budget, self.kv_scales)
            pool.expected_layers = self.layers_like[key.sliding_window, key.format]
            rows = self.rows[key] = Rows(pool, starts.copy(), self.shared_rows)
            if self.record_past:
                rows.activate_past_recording()
        rows.add_layer(layer_idx)
        return rows

    def fork(self) -> CachePools:
        twin = CachePools(self.config, self.kv_scales)
        twin.budget, twin.pools = self.budget, dict(self.pools)
        twin.rows = {key: rows.fork() for key, rows in self.rows.items()}
        twin.row_starts, twin.record_past = self.row_starts, self.record_past
        twin.expected_columns = self.expected_columns
        twin.layers_like = self.layers_like
        return twin


class PagedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, in blocks of the pool that its shape belongs to.

    Args:
        pools: shared by the layers of one cache.
        layer_idx: which of the cache's layers this is.
        sliding_window: tokens that a query sees, itself included, or None for all.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, pools: CachePools, layer_idx: int, sliding_window: int | None = None) -> None:
        super().__init__()
        self.is_sliding = sliding_window is not None
        if sliding_window is not None:
            self.sliding_window = sliding_window
            self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)
        self.layer_idx = layer_idx
        self._pools = pools
        self.format = pools.config.formats.format_of(layer_idx)
        pools.layers_like[sliding_window or 0, self.format] += 1
        self._key: PoolKey | None = None

    def __repr__(self) -> str:
        window = f", sliding_window={self.sliding_window}" if self.is_sliding else ""
        return f"PagedLayer(length={self.get_seq_length()}{window})"

    @property
    def rows(self) -> Rows | None:
        """The rows that this layer's tokens lie in; None before the first update."""
        rows = self._pools.rows.get(self._key)
        return rows if rows is not None and self.layer_idx in rows.lengths else None

    def forget(self) -> None:
        """Become a layer that was never fed."""
        self._key, self.is_initialized = None, False

    @property
    def record_past(self) -> bool:
        return self.is_sliding and self._pools.record_past

    @property
    def cumulative_length(self) -> int:
        """Columns seen so far, as sliding-window layers of transformers call it."""
        return self.get_seq_length()

    # Keys and values as DynamicLayer would hold them

    @property
    def keys(self) -> torch.Tensor | None:
        """Dense copy `[batch, num_kv_heads, length, head_dim]` of the cached keys; None before the first update."""
        return self._held(0)

    @property
    def values(self) -> torch.Tensor | None:
        """Dense copy of the cached values; None before the first update."""
        return self._held(1)

    @keys.setter
    def keys(self, value) -> None:
        self._refuse_assignment("keys", value)

    @values.setter
    def values(self, value) -> None:
        self._refuse_assignment("values", value)

    def _refuse_assignment(self, name: str, value) -> None:
        if value is not None:  # CacheLayerMixin.__init__ assigns None
            raise AttributeError(f"{name} of a PagedLayer lie in blocks and cannot be assigned; use update()")

    def _held(self, which: int) -> torch.Tensor | None:
        rows = self.rows
        if rows is None or not self.is_initialized:
            return None
        return self.gather(which, rows.kept_from(self.layer_idx), rows.lengths[self.layer_idx])

    def gather(self, which: int, first: int, last: int) -> torch.Tensor:
        """Dense keys (0) or values (1) of a range of columns, zeros where left padding was not stored."""
        rows = self.rows
        dense = rows.pool.gather(self.layer_idx, which, rows.slots(first, last))
        return dense.to(self._dtypes[which])

    # The contract of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take part in the pool of this shape: `key_states [batch, num_kv_heads, any, head_dim_k]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # What the layer gives back: DynamicLayer, too, widens values to the dtype of the keys.
        self._dtypes = (key_states.dtype, torch.promote_types(key_states.dtype, value_states.dtype))
        self._key = PoolKey(
            num_kv_heads=key_states.shape[1],
            head_dim_k=key_states.shape[3],
            head_dim_v=value_states.shape[3],
            dtype=self._dtypes[1],
            device=key_states.device,
            sliding_window=self.sliding_window if self.is_sliding else 0,
            format=self.format,
        )
        self._pools.join(self.layer_idx, self._key, key_states.shape[0], key_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and return all that their queries may attend to.

        Args:
            key_states: `[batch, num_kv_heads, T, head_dim_k]`.
            value_states: `[batch, num_kv_heads, T, head_dim_v]`.
        Returns:
            Keys and values `[batch, num_kv_heads, kv_length, head_dim]` with kv_length as `get_mask_sizes(T)`
            says: lazy tensors, or dense ones where gradients are wanted.
        Raises:
            ValueError: the shapes do not fit what the cache holds.
            RuntimeError: no block is left; the cache is as it was before this forward.
        """
        _check_shapes(key_states, value_states)
        first, num_columns = self.get_seq_length(), key_states.shape[2]
        try:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._check_fit(key_states, value_states)
            new_dtypes = (key_states.dtype, value_states.dtype)
            self._dtypes = tuple(torch.promote_types(*both) for both in zip(self._dtypes, new_dtypes, strict=True))
            kv_length, kv_offset = self.get_mask_sizes(num_columns)
            if num_columns == 0:
                return tuple(self.gather(which, kv_offset, kv_offset + kv_length) for which in (0, 1))
            dtype = self._key.dtype
            step = self.rows.write(self.layer_idx, key_states.to(dtype), value_states.to(dtype))
        except RuntimeError:  # exhausted: the layers before this one forget the forward, too
            for rows in self._pools.rows.values():
                rows.roll_back(first, num_columns)
            raise
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return self._differentiable(0, key_states, kv_offset), self._differentiable(1, value_states, kv_offset)
        return (
            self._lazy(0, key_states, kv_length, kv_offset, step),
            self._lazy(1, value_states, kv_length, kv_offset, step),
        )

    def _check_fit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, key = self.rows, self._key
        expected = (rows.num_rows, key.num_kv_heads)
        for name, states, dim in (("key", key_states, key.head_dim_k), ("value", value_states, key.head_dim_v)):
            if tuple(states.shape[:2]) != expected or states.shape[3] != dim:
                raise ValueError(
                    f"{name}_states {tuple(states.shape)} do not fit layer {self.layer_idx} of this cache, which holds "
                    f"[batch={expected[0]}, num_kv_heads={expected[1]}, any, head_dim={dim}]"
                    + ("; make a new PagedCache for another batch" if states.shape[0] != expected[0] else "")
                )
            if torch.promote_types(states.dtype, key.dtype) != key.dtype or states.device != key.device:
                raise ValueError(
                    f"{name}_states are {states.dtype} on {states.device}, layer {self.layer_idx} of this cache holds "
                    f"{key.dtype} on {key.device}"
                )

    def _lazy(self, which: int, states: torch.Tensor, kv_length: int, kv_offset: int, step) -> LazyKV:
        rows = self.rows

        def gather() -> torch.Tensor:
            # A later update or crop may have moved the blocks on: better no values than another step's.
            if self.rows is not rows or rows._step is not step:
                raise RuntimeError(
                    f"keys and values of layer {self.layer_idx} were read after the cache had moved on; "
                    "read them before the next update, crop or reorder"
                )
            return self.gather(which, kv_offset, kv_offset + kv_length)

        shape = (*states.shape[:2], kv_length, states.shape[3])
        return LazyKV(shape, self._dtypes[which], states.device, self, step, gather)

    def _differentiable(self, which: int, states: torch.Tensor, kv_offset: int) -> torch.Tensor:
        """Past from the blocks, without a graph, and the new tokens with theirs.

        So the new tokens are as the model computed them, also where the blocks keep them in 8 bits: rounding has no
        gradient. Later forwards read them as they were stored.
        """
        past_end = self.rows.lengths[self.layer_idx] - states.shape[2]
        if past_end == kv_offset:
            return states
        logger.warning_once(
            "A PagedCache keeps no autograd graph: gradients reach the tokens of this forward, not those cached before."
        )
        return torch.cat([self.gather(which, kv_offset, past_end), states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first column of the keys that `update` will return for `query_length` new tokens."""
        length = self.get_seq_length()
        offset = max(length - self.sliding_window + 1, 0) if self.is_sliding else 0
        return length - offset + query_length, offset

    def get_seq_length(self) -> int:
        """Columns seen so far, left padding included."""
        rows = self.rows
        return 0 if rows is None else rows.lengths[self.layer_idx]

    def get_max_length(self) -> int:
        """-1 where the layer grows without bound, else its window."""
        return self.sliding_window if self.is_sliding else -1

    def get_max_cache_shape(self) -> int:
        """The name that transformers 5.17 still has for `get_max_length`."""
        return self.get_max_length()

    def offload(self) -> None:
        raise NotImplementedError("offloading a PagedCache is not supported; its blocks stay on the model's device")

    prefetch = offload

    # Operations on the whole batch. The layers of one pool share rows, so PagedCache calls them once a pool;
    # a single layer cannot be changed alone.

    def activate_past_recording(self) -> None:
        """Keep tokens behind the window until the next crop, so that they can be rolled back to."""
        if self.is_sliding:
            self._pools.record_past = True
            for rows in self._pools.rows.values():
                rows.activate_past_recording()

    def _alone(self, *args, **kwargs) -> None:
        raise NotImplementedError(
            "the layers of a PagedCache share block tables: call crop, reset, reorder_cache, "
            "batch_repeat_interleave and batch_select_indices on the cache, not on one layer"
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _alone

    def twin(self) -> DynamicLayer:
        """A layer of the installed transformers with this one's lengths and no data, to ask how it would behave."""
        length, held = self.get_seq_length(), 0
        if self.rows is not None:
            held = length - self.rows.kept_from(self.layer_idx)
        if self.is_sliding:
            layer = DynamicSlidingWindowLayer(sliding_window=self.sliding_window)
            layer.cumulative_length, layer.record_past = length, self.record_past
        else:
            layer = DynamicLayer()
        layer.is_initialized = self.is_initialized
        if self.is_initialized:
            layer.keys = layer.values = torch.empty((1, 1, held, 1), device="meta")
        return layer


def _check_shapes(key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        if states.dim() != 4:
            raise ValueError(f"{name} must be [batch, num_kv_heads, tokens, head_dim], got {tuple(states.shape)}")
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            f"key_states {tuple(key_states.shape)} and value_states {tuple(value_states.shape)} must agree in "
            "batch, heads and tokens"
        )
