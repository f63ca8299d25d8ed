"""Storage: the K/V tensors of a group of layers that share one shape, and how large they may grow.

Contract: `KVPool` owns, for each of its layers, `key_cache [num_blocks, num_kv_heads, block_size,
head_dim_k]` and `value_cache` likewise with head_dim_v, and the BlockManager that hands out their
blocks; one block id means the same block in every layer of the pool. Structural changes and writes
happen under `lock`; a tensor that was read stays valid while its reader holds it, also across growth.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil
import torch

import hf_paged_kernels as kernels

from .block_manager import BlockManager
from .config import PagedCacheConfig

# Room that an on-demand pool takes beyond what is asked for: one sixteenth of its size and this many blocks
# more. It bounds both the memory held for nothing and the number of times that growing copies.
GROWTH_SLACK_BLOCKS = 8


class PoolKey(NamedTuple):
    """What layers must have in common to share a pool: shapes as seen in the first K/V, and window."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int


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
    """

    def __init__(self, key: PoolKey, config: PagedCacheConfig, budget: MemoryBudget) -> None:
        self.key, self.config, self.budget = key, config, budget
        self.block_size = config.block_size
        self.manager = BlockManager(config.num_blocks or 0, config.block_size)
        self.lock = threading.RLock()
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.expected_layers = 0  # layers that will probably join, for which room to grow is left
        self.max_blocks: int | None = None  # how far it may grow, where pools divide one budget
        self._orphans: deque = deque()  # requests whose owner was collected, freed at the next safe moment

    def add_layer(self, layer_idx: int) -> None:
        """Make the tensors of a layer, as many blocks as the pool has.

        Raises:
            RuntimeError: the memory budget does not cover them.
        """
        with self.lock:
            if layer_idx in self._caches:
                return
            num_blocks = self.manager.num_blocks
            self.budget.take(
                self.key.device,
                num_blocks * self.block_bytes,
                f"a pool of {num_blocks} blocks of {self.block_size} tokens for layer {layer_idx}",
            )
            self._caches[layer_idx] = (
                self._empty(num_blocks, self.key.head_dim_k),
                self._empty(num_blocks, self.key.head_dim_v),
            )

    def caches(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`key_cache` and `value_cache` of a layer."""
        return self._caches[layer_idx]

    def storages(self) -> Iterator[torch.Tensor]:
        """Every tensor that the pool owns."""
        for pair in list(self._caches.values()):
            yield from pair

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values together."""
        key = self.key
        return key.num_kv_heads * self.block_size * (key.head_dim_k + key.head_dim_v) * key.dtype.itemsize

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
            per_block = self.block_bytes * len(self._caches)
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
            to_come = max(0, self.expected_layers - len(self._caches))
            room = self.budget.available(self.key.device) // (self.block_bytes * (len(self._caches) + to_come))
            reserved = total * to_come // (len(self._caches) + to_come)
            extra = max(0, min(slack, room - reserved - missing))
            self._grow(missing + (extra if self.max_blocks is None else min(extra, affordable - missing)))

    def _grow(self, num_new_blocks: int) -> None:
        old, new = self.manager.num_blocks, self.manager.num_blocks + num_new_blocks
        purpose = f"growing a pool of {len(self._caches)} layers from {old} to {new} blocks"
        self.budget.take(self.key.device, num_new_blocks * self.block_bytes * len(self._caches), purpose)
        grown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            # One tensor at a time, so that no more than one tensor of the old pool lives beside its successor.
            for layer_idx in list(self._caches):
                key_cache = self._enlarged(self._caches[layer_idx][0], new)
                self._caches[layer_idx] = (key_cache, self._caches[layer_idx][1])
                value_cache = self._enlarged(self._caches[layer_idx][1], new)
                self._caches[layer_idx] = grown[layer_idx] = (key_cache, value_cache)
        except Exception:  # out of memory half-way: larger tensors are harmless, ids beyond `old` stay unused
            missing = (len(self._caches) - len(grown)) * num_new_blocks * self.block_bytes
            self.budget.give_back(self.key.device, missing)
            raise
        self.manager.grow(num_new_blocks)

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `key [T, num_kv_heads, head_dim_k]` and `value` at `slot_mapping [T]`; slot -1 stores nothing."""
        key_cache, value_cache = self._caches[layer_idx]
        kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) ids, in every layer."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self.key.device)
        for key_cache, value_cache in self._caches.values():
            kernels.copy_blocks(key_cache, value_cache, pairs)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set whole blocks to zero in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.key.device)
        for cache in self.storages():
            cache.index_fill_(0, index, 0)

    def gather(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Dense copy of the tokens at `slots [batch, T]`, zeros at slot -1: `[batch, num_kv_heads, T, head_dim]`."""
        blocks = slots.clamp(min=0) // self.block_size
        offsets = slots.clamp(min=0) % self.block_size
        dense = cache[blocks, :, offsets]  # [batch, T, num_kv_heads, head_dim]
        dense.masked_fill_((slots < 0)[..., None, None], 0)
        return dense.transpose(1, 2).contiguous()  # models reshape it as they would a concatenated one

    def _empty(self, num_blocks: int, head_dim: int) -> torch.Tensor:
        shape = (num_blocks, self.key.num_kv_heads, self.block_size, head_dim)
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            return torch.empty(shape, dtype=self.key.dtype, device=self.key.device)

    def _enlarged(self, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        if cache.shape[0] >= num_blocks:
            return cache
        larger = self._empty(num_blocks, cache.shape[-1])
        larger[: cache.shape[0]].copy_(cache)
        return larger
