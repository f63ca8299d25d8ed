"""Noticing that what a model computes has changed, so that nothing computed before is taken for fresh.

Contract:

- `WeightsWatch(model)` is cheap. `check()` and `check_fingerprint()` tell whether something changed since the last of
  either; `epoch` rises with each change noticed. The first of each kind sets what later ones compare with.
- `check()`, made for every step, sees: a module, parameter, buffer or forward hook put in, taken out or replaced; a
  change in place that torch counts (`Tensor._version`: optimizers, `load_state_dict`, `p.mul_()`); memory replaced
  (`param.data = tensor`, `model.to()`); a step of any `torch.optim` optimizer that holds one of the parameters, the
  fused ones too, which count no version; an adapter of PEFT switched, merged, scaled, added or disabled.
- `check_fingerprint()` also sees writes that leave no trace (`param.data.add_()`, numpy, storages, parameters made
  under `inference_mode`), and modules whose class or `forward` was replaced. Where such a write is made between two
  steps, say so: `weights_changed(model)`.
- Not seen: settings in a config or in a module's plain attributes. No changes of weights are: `train()`, `eval()`,
  gradients, `requires_grad`, and what a dynamic rotary embedding computes anew in each forward.
- A false alarm costs speed, a miss costs right text: whoever is in doubt here says "changed".
- Where accelerate offloads a module, its parameters are new objects in each forward: what its hook loads from is
  watched instead, files by size and time of change.

One thread at a time may check; optimizers and `weights_changed` may come from any thread. Nothing here keeps a model
alive; but modules and parameters that were replaced stay in memory until the next check, if `rest()` was not called.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .fingerprint import fingerprint
from .weights_view import WeightsView

_lock = threading.Lock()
_watches: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()
_hook: Any = None


class WeightsWatch:
    """Notices changes of one model's weights. Holds the model weakly; a copy of the model is another model."""

    def __init__(self, model: nn.Module) -> None:
        """Watch `model`. Looks at nothing yet. ValueError when it is no `torch.nn.Module`."""
        _require_module(model)
        self._model = weakref.ref(model, _forget(weakref.ref(self)))
        self._view: WeightsView | None = None
        self._content: tuple | None = None
        self._parameter_ids: frozenset[int] = frozenset()
        self._resting = False
        self._epoch = 0
        self._reported = 0
        with _lock:
            _watches.add(self)
            _watch_optimizers()

    @property
    def epoch(self) -> int:
        """Number of changes noticed so far; 0 at first, never falls."""
        return self._epoch

    def check(self) -> bool:
        """Whether something changed since the last check, as far as it shows without reading weights.

        Some tens of microseconds for a model of 272 parameters. After `rest()` the next check is a
        `check_fingerprint()`. RuntimeError when the model no longer exists.
        """
        view = self._view
        if view is not None and self._epoch == self._reported and view.holds():
            return False
        if self._resting:
            return self.check_fingerprint()
        self._look(self._existing_model())
        return self._report()

    def check_fingerprint(self) -> bool:
        """Whether something changed since the last check, the content of all weights included.

        Reads every weight once. A change that `check()` told of since the last reading is told of once more here:
        whether contents changed again after it cannot be known. RuntimeError when the model no longer exists.
        """
        model = self._existing_model()
        before, was_resting = self._content, self._resting
        changed = self._look(model)
        view = self._view
        self._content = (view.signature(model), fingerprint(view.leaves))
        unknown = before is None and was_resting  # nothing was read before the rest: there is nothing to compare with
        if not changed and (unknown or (before is not None and before != self._content)):
            self._bump()
        return self._report()

    def rest(self) -> None:
        """Hold nothing of the model until the next check, which compares contents. For a batcher that goes idle."""
        view = self._view
        if view is not None:
            if self._epoch == self._reported and not view.holds():
                self._bump()  # a change that only the view can show
            self._view = None
            self._resting = True

    def _existing_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this watch was made for no longer exists; make a watch of another one")
        return model

    def _look(self, model: nn.Module) -> bool:
        """Compare with the last view and bring it up to date. Returns whether it differed."""
        view = self._view
        if view is not None and view.holds():
            return False
        changed = view is not None
        if changed:
            self._bump()
        # Taken before anything is read: a change made meanwhile shows at the next check.
        self._view = WeightsView(model)
        self._parameter_ids = frozenset(map(id, self._view.tensors))
        self._resting = False
        return changed

    def _bump(self) -> None:
        with _lock:
            self._epoch += 1

    def _report(self) -> bool:
        epoch = self._epoch
        changed, self._reported = epoch != self._reported, epoch
        return changed


def weights_changed(model: nn.Module) -> None:
    """Say that weights of `model` were written in a way that leaves no trace, while a batcher runs.

    Raises the epoch of every watch of this model, of a model that contains it, and of one inside it.
    ValueError when `model` is no `torch.nn.Module`.
    """
    _require_module(model)
    inside = set(model.modules())
    for watch in _all_watches():
        watched = watch._model()
        if watched is not None and (watched in inside or any(module is model for module in watched.modules())):
            watch._bump()


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}: {model!r}")


def _all_watches() -> list[WeightsWatch]:
    with _lock:
        return list(_watches)


def _forget(reference: weakref.ref[WeightsWatch]):
    """What to do when a watched model goes: let go of its parts."""

    def forget(_model: weakref.ref) -> None:
        watch = reference()
        if watch is not None:
            watch._view = watch._content = None

    return forget


def _watch_optimizers() -> None:
    """Be told of every optimizer step in this process, once. The caller holds the lock."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    watches = [watch for watch in _all_watches() if watch._parameter_ids]
    if watches:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for watch in watches:
            if not stepped.isdisjoint(watch._parameter_ids):
                watch._bump()
