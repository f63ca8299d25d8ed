"""Settings of the paged cache and of the scheduler.

Contract: frozen dataclasses that check themselves when they are made, so that a wrong value is
refused where the user wrote it. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


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
        kv_cache_dtype: "auto" keeps keys and values in the dtype the model computes them in.

    Raises:
        ValueError: a value is out of its bounds.
        NotImplementedError: a `kv_cache_dtype` that does not exist yet.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        _check_count("block_size", self.block_size)
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks)
        fraction = self.memory_fraction
        if fraction is not None and (
            isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1
        ):
            raise ValueError(f"memory_fraction must be a number in (0, 1] or None, got {fraction!r}")
        if not isinstance(self.kv_cache_dtype, str):
            raise ValueError(f"kv_cache_dtype must be a string, got {self.kv_cache_dtype!r}")
        if self.kv_cache_dtype != "auto":
            raise NotImplementedError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not supported yet; use 'auto' (the model's dtype)"
            )

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

    Raises:
        ValueError: a value is out of its bounds.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    policy: str = "fcfs"
    chunked_prefill_size: int | None = None

    def __post_init__(self) -> None:
        _check_count("max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if self.chunked_prefill_size is not None:
            _check_count("chunked_prefill_size", self.chunked_prefill_size)

    def for_device(self, device_type: str) -> SchedulerConfig:
        """The same settings with the default of `max_num_batched_tokens` on this kind of device filled in."""
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
