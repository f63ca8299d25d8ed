"""Switching a model to hf_paged attention for the time of a call, and back.

Contract: while a paged call runs, the configs of its model name "hf_paged" and its modules are in eval mode;
afterwards, also after an error, everything is as it was. Configs are shared between threads: a call that is not
paged asks `before()` and so gets the implementation that it would have had.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .module_tree import all_modules

NAME = "hf_paged"


class _Switches:
    """Which configs were switched to hf_paged for the time of a call, and what they had before."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._before: dict[int, tuple[PreTrainedConfig, str | None]] = {}
        self._models: dict[int, list] = {}  # by id: model, calls, configs, modules in training
        self._local = threading.local()

    @property
    def in_paged_call(self) -> bool:
        return getattr(self._local, "depth", 0) > 0

    @property
    def active(self) -> bool:
        """Whether any paged call is running, in any thread."""
        return bool(self._models)

    @property
    def wants_weights(self) -> bool:
        """Whether the paged call of this thread returns attention weights, which only dense attention has."""
        return getattr(self._local, "weights", False)

    def on_causal_mask(self, callback: Callable[[torch.Tensor | None], None] | None) -> None:
        """Have `callback` called, once, with the 2D padding mask of the first causal mask that this thread makes."""
        self._local.on_mask = callback

    def causal_mask_made(self, attention_mask: torch.Tensor | None) -> None:
        """Called by the mask function: the model of this thread's paged call masks what this mask says."""
        callback = getattr(self._local, "on_mask", None)
        if callback is not None:
            self._local.on_mask = None
            callback(attention_mask)

    @property
    def packed_step(self):
        """The PackedStep of the packed forward that this thread runs, or None."""
        return getattr(self._local, "packed", None)

    @contextlib.contextmanager
    def packed(self, step) -> Iterator[None]:
        """Run one packed forward: masks and attention of this thread belong to `step`."""
        outer = self.packed_step
        self._local.packed = step
        try:
            yield
        finally:
            self._local.packed = outer

    @contextlib.contextmanager
    def switched(self, model: PreTrainedModel, attention: bool = True, weights: bool = False) -> Iterator[None]:
        """Run a paged call: the model in eval mode, with hf_paged attention where it takes it; then as before.

        Args:
            attention: whether hf_paged attention may serve the model at all.
            weights: the call returns attention weights.
        """
        self._enter(model, attention)
        self._local.depth = getattr(self._local, "depth", 0) + 1
        outer = self.wants_weights, getattr(self._local, "on_mask", None)
        self._local.weights, self._local.on_mask = weights, None
        try:
            yield
        finally:
            self._local.depth -= 1
            self._local.weights, self._local.on_mask = outer
            self._leave(model)

    def _enter(self, model: PreTrainedModel, attention: bool) -> None:
        with self.lock:
            entry = self._models.get(id(model))
            if entry is None:
                modules = list(all_modules(model))
                configs = _configs(modules)
                for config in configs:
                    self._before.setdefault(id(config), (config, config._attn_implementation))
                training = [module for module in modules if module.training]
                entry = self._models[id(model)] = [model, 0, configs, training]
                try:
                    # Dropout and gradient checkpointing (which drops the cache) are for training steps.
                    for module in training:
                        module.training = False
                    if attention and model._can_set_attn_implementation():
                        model.set_attn_implementation(NAME)
                except BaseException:
                    self._restore(model)
                    raise
            entry[1] += 1

    def _leave(self, model: PreTrainedModel) -> None:
        with self.lock:
            entry = self._models[id(model)]
            entry[1] -= 1
            if entry[1] == 0:
                self._restore(model)

    def _restore(self, model: PreTrainedModel) -> None:
        _, _, configs, training = self._models.pop(id(model))
        in_use = {id(config) for other in self._models.values() for config in other[2]}
        for config in configs:
            if id(config) in self._before and id(config) not in in_use:
                _, before = self._before.pop(id(config))
                config._attn_implementation_internal = before
        for module in training:
            module.training = True

    def before(self, config: PreTrainedConfig | None) -> str | None:
        """The implementation that a config has when no paged call is running; None if that is hf_paged itself."""
        if config is None:
            return None
        _, name = self._before.get(id(config), (None, config._attn_implementation))
        return None if name == NAME else name or "eager"


switches = _Switches()


def _configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Every config that `set_attn_implementation` may change."""
    found: dict[int, PreTrainedConfig] = {}
    pending = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            pending.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())
