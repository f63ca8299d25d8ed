"""Storage: the K/V tensors of a group of layers that share one shape, and how large they may grow.

Contract: `KVPool` owns, for each of its layers, `key_cache [num_blocks, num_kv_heads, block_size,
head_dim_k]` and `value_cache` likewise with head_dim_v, their scales where they are kept in 8 bits (see
`LayerPages`), and the BlockManager that hands out their blocks; one block id means the same block in
every layer of the pool. Structural changes and writes happen under `lock`; a tensor that was read stays
valid while its reader holds it, also across growth.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil
import torch

from .block_manager import BlockManager
from .config import PagedCacheConfig
from .kv_format import KVFormat
from .kv_pages import LayerPages

# Room that an on-demand pool takes beyond what is asked for: one sixteenth of its size and this many blocks
# more. It bounds both the memory held for nothing and the number of times that growing copies.
GROWTH_SLACK_BLOCKS = 8


class PoolKey(NamedTuple):
    """What layers must have in common to share a pool: shapes as seen in the first K/V, window, and format.

    `dtype` is the one that the model computes keys and values in, whatever they are kept in.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int
    format: KVFormat = KVFormat()


class MemoryBudget:
    """Bytes that all pools of one cache may take on a device, fixed when the device is first used.

    Args:
        memory_fraction: share of the free memory; None means 0.9 on an accelerator and 0.4 on a CPU.
    """

    def __init__(self, memory_fraction: float | None) -> None:
        self.memory_fraction = memory_fraction
        self._limits: dict[torch.device, tuple[int, int, float]] = {}  # device -> limit, free, fraction
        self._taken: dict[torch.device, int] = {}

    def available(self, device: torch.device) -> int:
        """Bytes still to be had on `device`."""
        return self._limit(device)[0] - self._taken.get(device, 0)

    def take(self, device: torch.device, num_bytes: int, purpose: str) -> None:
        """Count `num_bytes` as taken.

        Raises:
            RuntimeError: they exceed the budget; nothing is taken.
        """
        limit, free, fraction = self._limit(device)
        taken = self._taken.get(device, 0)
        if taken + num_bytes > limit:
            raise RuntimeError(
                f"{purpose} needs {num_bytes:,} bytes, {max(0, limit - taken):,} of {limit:,} available on {device} "
                f"(memory_fraction={fraction} of {free:,} free); raise memory_fraction, lower num_blocks, "
                "or run fewer or shorter sequences"
            )
        self._taken[device] = taken + num_bytes

    def give_back(self, device: torch.device, num_bytes: int) -> None:
        self._taken[device] -= num_bytes

    def _limit(self, device: torch.device) -> tuple[int, int, float]:
        if device not in self._limits:
            on_gpu = device.type == "cuda"
            fraction = self.memory_fraction or (0.4 if device.type == "cpu" else 0.9)
            free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
            self._limits[device] = (int(free * fraction), free, fraction)
        return self._limits[device]


class KVPool:
    """Blocks of keys and values for the layers of one shape.

    Args:
        key: the shape that its layers share.
        config: block size and, where fixed, the number of blocks.
        budget: shared by all pools of a cache.
        kv_scales: the KVScales that give each layer its fixed scales; None where no scale is fixed.
    """

    def __init__(self, key: PoolKey, config: PagedCacheConfig, budget: MemoryBudget, kv_scales=None) -> None:
        self.key, self.config, self.budget, self._kv_scales = key, config, budget, kv_scales
        self.block_size = config.block_size
        self.manager = BlockManager(config.num_blocks or 0, config.block_size)
        self.lock = threading.RLock()
        self._pages: dict[int, LayerPages] = {}
        self.expected_layers = 0  # layers that will probably join, for which room to grow is left
        self.max_blocks: int | None = None  # how far it may grow, where pools divide one budget
        self._orphans: deque = deque()  # requests whose owner was collected, freed at the next safe moment

    def add_layer(self, layer_idx: int) -> None:
        """Make the tensors of a layer, as many blocks as the pool has.

        Raises:
            RuntimeError: the memory budget does not cover them.
        """
        with self.lock:
            if layer_idx in self._pages:
                return
            key, num_blocks, fixed = self.key, self.manager.num_blocks, (None, None)
            if key.format.is_static and self._kv_scales is not None:
                fixed = self._kv_scales.layer(layer_idx)
            num_bytes = num_blocks * self.block_bytes
            purpose = f"a pool of {num_blocks} blocks of {self.block_size} tokens for layer {layer_idx}"
            self.budget.take(key.device, num_bytes, purpose)
            shape = (num_blocks, key.num_kv_heads, self.block_size)
            try:
                self._pages[layer_idx] = LayerPages(
                    shape, (key.head_dim_k, key.head_dim_v), key.dtype, key.device, key.format, fixed
                )
            except Exception:
                self.budget.give_back(key.device, num_bytes)
                raise

    def pages(self, layer_idx: int) -> LayerPages:
        """The tensors of a layer."""
        return self._pages[layer_idx]

    def storages(self) -> Iterator[torch.Tensor]:
        """Every tensor with blocks that the pool owns."""
        for pages in list(self._pages.values()):
            yield from pages.tensors()

    @property
    def layers(self) -> list[int]:
        """The layers that are in the pool."""
        return list(self._pages)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: keys, values, and the scales beside them."""
        key = self.key
        token = key.format.token_bytes(key.num_kv_heads, key.head_dim_k, key.head_dim_v, key.dtype.itemsize)
        return self.block_size * token

    def discard_later(self, request_ids: Sequence) -> None:
        """Free requests at the next safe moment. Takes no lock: finalizers run inside any other operation."""
        self._orphans.extend(request_ids)

    def collect(self) -> None:
        """Free the requests whose owner is gone."""
        with self.lock:
            while self._orphans:
                self.manager.free_request(self._orphans.popleft())

    def ensure_available(self, num_blocks: int) -> None:
        """Have `num_blocks` free blocks, growing the pool where its config allows.

        Raises:
            RuntimeError: there are fewer and the pool cannot grow so far; nothing changes.
        """
        with self.lock:
            self.collect()
            missing = num_blocks - self.manager.available_blocks
            if missing <= 0:
                return
            total = self.manager.num_blocks
            if self.config.num_blocks is not None:
                raise RuntimeError(
                    f"needs {num_blocks} blocks, {self.manager.available_blocks} available of {total} "
                    f"(block_size={self.block_size}); raise num_blocks, leave it None to grow on demand, "
                    "or run fewer or shorter sequences"
                )
            per_block = self.block_bytes * len(self._pages)
            affordable = self.budget.available(self.key.device) // per_block if per_block else missing
            if self.max_blocks is not None:
                affordable = min(affordable, self.max_blocks - total)
            slack = (total + missing) // 16 + GROWTH_SLACK_BLOCKS
            if affordable < missing:
                limit, free, fraction = self.budget._limit(self.key.device)
                raise RuntimeError(
                    f"needs {num_blocks} blocks, {self.manager.available_blocks} available of {total}, and the pool "
                    f"may grow by {max(0, affordable)} (memory_fraction={fraction} of {free:,} bytes free on "
                    f"{self.key.device}); raise memory_fraction or run fewer or shorter sequences"
                )
            # The first layers of a first forward leave what those to come will need.
            to_come = max(0, self.expected_layers - len(self._pages))
            room = self.budget.available(self.key.device) // (self.block_bytes * (len(self._pages) + to_come))
            reserved = total * to_come // (len(self._pages) + to_come)
            extra = max(0, min(slack, room - reserved - missing))
            self._grow(missing + (extra if self.max_blocks is None else min(extra, affordable - missing)))

    def _grow(self, num_new_blocks: int) -> None:
        old, new = self.manager.num_blocks, self.manager.num_blocks + num_new_blocks
        purpose = f"growing a pool of {len(self._pages)} layers from {old} to {new} blocks"
        self.budget.take(self.key.device, num_new_blocks * self.block_bytes * len(self._pages), purpose)
        grown = 0
        try:
            for pages in self._pages.values():
                pages.enlarge(new)
                grown += 1
        except Exception:  # out of memory half-way: larger tensors are harmless, ids beyond `old` stay unused
            missing = (len(self._pages) - grown) * num_new_blocks * self.block_bytes
            self.budget.give_back(self.key.device, missing)
            raise
        self.manager.grow(num_new_blocks)

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `key [T, num_kv_heads, head_dim_k]` and `value` at `slot_mapping [T]`; slot -1 stores nothing."""
        self._pages[layer_idx].write(key, value, slot_mapping)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) ids, in every layer."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self.key.device)
        for pages in self._pages.values():
            pages.copy_blocks(pairs)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set whole blocks to zero in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.key.device)
        for pages in self._pages.values():
            pages.zero_blocks(index)

    def fill_with_nan(self) -> None:
        """Make every slot of every layer NaN, so that whatever reads one that was never written shows."""
        for pages in self._pages.values():
            pages.fill_with_nan()

    def gather(self, layer_idx: int, which: int, slots: torch.Tensor) -> torch.Tensor:
        """Dense copy of a layer's keys (0) or values (1) at `slots [batch, T]`, zeros at slot -1, in the model's dtype.

        Returns `[batch, num_kv_heads, T, head_dim]`.
        """
        return self._pages[layer_idx].gather(which, slots, self.key.dtype)
