"""Measures what a KV cache holds: bytes of live tensor storages, never a formula.

Contract: `storages(cache)` is every distinct storage reachable from a cache; a view counts as
the whole storage that it keeps alive, and a storage that several tensors share counts once.
`live_bytes(cache)` is their sum. `PeakMeter(model)` samples the cache that the model's forward
was called with, after each forward, and keeps the largest sample. A sample sees what is held
between steps; copies that live only inside a forward are not counted, for any cache.

A cache is anything with `storages()` (PagedCache: every tensor that it owns), with `layers`
(transformers' Cache), or with `self_attention_cache` and `cross_attention_cache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def live_bytes(cache: Any) -> int:
    return sum(storage.nbytes() for storage in storages(cache))


def storages(cache: Any) -> list[torch.UntypedStorage]:
    # By the address of the storage object. The storages are held until the sum is made: an
    # address that was freed could be handed out again and pass for one already seen.
    distinct = {}
    for tensor in _tensors(cache):
        storage = tensor.untyped_storage()
        distinct[storage._cdata] = storage
    return list(distinct.values())


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    if cache is None:
        return
    if callable(getattr(cache, "storages", None)):
        yield from cache.storages()
    elif hasattr(cache, "self_attention_cache"):
        yield from _tensors(cache.self_attention_cache)
        yield from _tensors(cache.cross_attention_cache)
    elif hasattr(cache, "layers"):
        # All of a layer's tensors, not only `keys` and `values`: quantised layers and the states
        # of linear attention live under other names.
        for layer in cache.layers:
            yield from _tensors_in(vars(layer).values())
    else:
        raise ValueError(f"cannot measure a {type(cache).__name__}: it has neither `layers` nor `storages()`")


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class PeakMeter:
    """Context manager around calls of `model.generate` (or forwards) that use a KV cache.

    `peak_bytes`: the largest sample. At that sample: `rows` (batch size), `seq_length` (cached
    positions of a row, left padding included) and their product `positions`. `forwards`: how many
    forwards were seen with a cache; 0 means that nothing was measured. A later sample as large as
    the peak replaces it, so the positions are those of the fullest moment. `tokens`: what a cache without
    rows and padding says that it held then (PackedCache), or None.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.peak_bytes = self.rows = self.seq_length = self.forwards = 0
        self.tokens: int | None = None
        self._hook: Any = None

    @property
    def positions(self) -> int:
        return self.rows * self.seq_length

    def __enter__(self) -> PeakMeter:
        self._hook = self.model.register_forward_hook(self._sample, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()

    def _sample(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        cache = kwargs.get("past_key_values")
        if cache is None:  # a forward without one may have made its own
            cache = getattr(output, "past_key_values", None)
        if cache is None:
            return
        self.forwards += 1
        held = live_bytes(cache)
        if held >= self.peak_bytes:
            self.peak_bytes = held
            self.rows = _batch_size(args, kwargs)
            self.seq_length = int(cache.get_seq_length())
            self.tokens = cache.num_tokens_held() if hasattr(cache, "num_tokens_held") else None


def _batch_size(args: tuple, kwargs: dict) -> int:
    for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(value, torch.Tensor):
            return value.shape[0]
    return 0
