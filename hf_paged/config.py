"""Settings of the paged cache and of the scheduler.

Contract: frozen dataclasses that check themselves when they are made, so that a wrong value is
refused where the user wrote it. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .kv_format import DYNAMIC, FormatPlan, join, spell_layers


@dataclass(frozen=True)
class PagedCacheConfig:
    """How the KV cache is divided and how much memory it may take.

    Args:
        block_size: tokens in a block, any integer >= 1.
        num_blocks: blocks of each group of layers that share one shape, allocated at once. `None`
            lets the pool grow on demand, up to `memory_fraction`.
        memory_fraction: share, in (0, 1], of the memory that is free on the device when the cache is
            first written; the pools of one cache never take more. `None` means 0.9 on an accelerator and
            0.4 on a CPU.
        kv_cache_dtype: "auto" keeps keys and values in the dtype the model computes them in; "fp8_e4m3", "fp8_e5m2"
            and "int8" keep a byte for each number, and scales. Keys and values may differ: "k:int8,v:fp8_e4m3", or a
            dict of "k" and "v"; a side that is not named is "auto".
        kv_scale_granularity: what shares a scale. "per_token_head" takes it from each token's own keys and values of
            each head as they come, and needs nothing else. "per_head", "per_tensor" and, for keys alone,
            "per_channel" take fixed ones from `kv_scales`. Spelled for keys and values apart like `kv_cache_dtype`.
        kv_scales: path of a file of fixed scales, as `hf_paged.calibrate_kv_scales` writes it.
        skip_layers: numbers of layers that are kept in the model's dtype, or a dict of layer -> `kv_cache_dtype`.
        rotate_keys: whether keys are rotated by a Hadamard matrix before they are rounded, and queries with them, which
            keeps more of them. `None` means wherever 8-bit keys have a scale for each token and head; others, and heads
            of odd size, are kept as they are. `True` means the same, and refuses a config without such keys.
        enable_prefix_caching: whether a request that goes through a `ContinuousBatcher` uses the blocks of earlier
            ones that begin with the same tokens.

    What is given in several spellings is kept in one, so that configs which mean the same are equal.

    Raises:
        ValueError: a value is out of its bounds, or does not go with another.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    kv_cache_dtype: str | Mapping[str, str] = "auto"
    enable_prefix_caching: bool = True
    kv_scale_granularity: str | Mapping[str, str] = DYNAMIC
    kv_scales: str | os.PathLike | None = None
    skip_layers: tuple | Mapping[int, str] = ()
    rotate_keys: bool | None = None

    def __post_init__(self) -> None:
        _check_count("block_size", self.block_size)
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks)
        fraction = self.memory_fraction
        if fraction is not None and (
            isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1
        ):
            raise ValueError(f"memory_fraction must be a number in (0, 1] or None, got {fraction!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        scales = os.fspath(self.kv_scales) if isinstance(self.kv_scales, os.PathLike) else self.kv_scales
        if scales is not None and (not isinstance(scales, str) or not scales):
            raise ValueError(f"kv_scales must be the path of a file or None, got {self.kv_scales!r}")
        plan = self._plan(scales)
        for name, value in (
            ("kv_cache_dtype", join(plan.kv_cache_dtype)),
            ("kv_scale_granularity", join(plan.kv_scale_granularity)),
            ("kv_scales", scales),
            ("skip_layers", spell_layers(plan.skip_layers)),
            ("rotate_keys", False if self.rotate_keys is False else None),
        ):
            object.__setattr__(self, name, value)

    @cached_property
    def formats(self) -> FormatPlan:
        """In which format each layer is kept."""
        return self._plan(self.kv_scales)

    def _plan(self, kv_scales: str | None) -> FormatPlan:
        settings = self.kv_cache_dtype, self.kv_scale_granularity, self.skip_layers
        return FormatPlan.of(*settings, kv_scales, self.rotate_keys)

    def to_dict(self) -> dict:
        """The settings by name; transformers writes them so when it saves a GenerationConfig that holds this one."""
        return dataclasses.asdict(self)

    @classmethod
    def from_any(cls, value: PagedCacheConfig | Mapping | None) -> PagedCacheConfig:
        """The config that a caller meant: one of these, a mapping of its fields, or None for the defaults.

        Raises:
            ValueError: `value` is something else, or names a setting that does not exist.
        """
        return _from_any(cls, "cache_config", value)


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests a `ContinuousBatcher` runs at once and how it shares a step among them.

    Args:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of one forward, over all requests. `None` means 8192 on an accelerator and
            2048 on a CPU.
        policy: "fcfs" serves requests in the order of their arrival; "priority" by their priority, the lower
            number first, and in the order of arrival where that is equal.
        chunked_prefill_size: tokens of one prompt in one forward, which bounds how long a prompt can hold up the
            tokens of others. `None` leaves it to `max_num_batched_tokens`.
        cuda_graphs: whether steps that only decode are captured as CUDA graphs and replayed. `None` means yes on a
            CUDA device.
        cuda_graph_sizes: numbers of rows to capture, rising; a step takes the smallest that holds its rows, and one
            with more rows than all of them is not replayed. `None` means 1, 2, 4, multiples of 8, above 256 of 32,
            and `max_num_seqs`.

    Raises:
        ValueError: a value is out of its bounds.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    policy: str = "fcfs"
    chunked_prefill_size: int | None = None
    cuda_graphs: bool | None = None
    cuda_graph_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_count("max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if self.chunked_prefill_size is not None:
            _check_count("chunked_prefill_size", self.chunked_prefill_size)
        if self.cuda_graphs not in (None, True, False):
            raise ValueError(f"cuda_graphs must be True, False or None, got {self.cuda_graphs!r}")
        if self.cuda_graph_sizes is not None:
            self._check_graph_sizes()

    def _check_graph_sizes(self) -> None:
        sizes = self.cuda_graph_sizes
        if not isinstance(sizes, tuple | list) or not sizes:
            raise ValueError(f"cuda_graph_sizes must be integers or None, got {sizes!r}")
        for size in sizes:
            _check_count("cuda_graph_sizes: each", size)
        if list(sizes) != sorted(set(sizes)) or sizes[-1] > self.max_num_seqs:
            raise ValueError(f"cuda_graph_sizes must rise up to max_num_seqs={self.max_num_seqs} at most, got {sizes}")
        if self.cuda_graphs is False:
            raise ValueError(f"cuda_graph_sizes={sizes} are of no use with cuda_graphs=False")
        object.__setattr__(self, "cuda_graph_sizes", tuple(sizes))

    def for_device(self, device_type: str) -> SchedulerConfig:
        """The same settings with the default of `max_num_batched_tokens` on this kind of device filled in.

        Raises:
            ValueError: they ask for CUDA graphs, and this is another kind of device.
        """
        if self.cuda_graphs and device_type != "cuda":
            raise ValueError(f"cuda_graphs=True needs a model on a CUDA device, this one is on {device_type}")
        if self.max_num_batched_tokens is not None:
            return self
        return dataclasses.replace(self, max_num_batched_tokens=2048 if device_type == "cpu" else 8192)

    @classmethod
    def from_any(cls, value: SchedulerConfig | Mapping | None) -> SchedulerConfig:
        """The config that a caller meant: one of these, a mapping of its fields, or None for the defaults.

        Raises:
            ValueError: `value` is something else, or names a setting that does not exist.
        """
        return _from_any(cls, "scheduler_config", value)


def _from_any(cls, name: str, value):
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict or a {cls.__name__}, got {type(value).__name__}")
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(known)}")
    return cls(**value)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
