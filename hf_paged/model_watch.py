"""Whether a model is still what it was when something about it was frozen.

Contract: `ModelWatch(model)` notes where the weights and buffers lie and which modules there are; `is_unchanged` is
cheap enough for each step (about 0.1 microseconds a tensor), thoroughly it walks through all modules. It does not look
at values: weights that an optimizer changes in place are at the same address, and whatever reads them there sees them.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as modules


class ModelWatch:
    """Addresses and modules of a model, as they are now."""

    def __init__(self, model) -> None:
        self._modules = [(id(module), id(module.__dict__.get("forward"))) for module in model.modules()]
        self._tensors = _tensors(model)
        self._hooks = _hooks(model)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def is_unchanged(self, model, thoroughly: bool = True) -> bool:
        """Whether the model computes with the same tensors, without hooks, and thoroughly: in the same modules."""
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses or self.has_hooks():
            return False
        if not thoroughly:
            return True
        now = ModelWatch(model)
        return (now._modules, now._addresses) == (self._modules, self._addresses)

    def has_hooks(self) -> bool:
        """Whether a hook must see the forwards of the modules that there were."""
        return any(self._hooks)

    @staticmethod
    def reason_against(model) -> str | None:
        """Why a forward of this model is more than its tensors, or None."""
        if any(_hooks(model)):
            return "a hook must see every forward"
        for name, module in model.named_modules():
            if hasattr(module, "_hf_hook"):
                return f"accelerate's hook on {name or 'the model'} moves tensors in every forward"
            if "_disable_adapters" in vars(module) or hasattr(type(module), "_disable_adapters"):  # PEFT's layers
                return f"adapters in {name or 'the model'} may be switched between two forwards"
        devices = {tensor.device for tensor in _tensors(model)}
        if len(devices) > 1:
            return f"its weights lie on {', '.join(sorted(map(str, devices)))}"
        return None


def _tensors(model) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _hooks(model) -> list[dict]:
    """The dicts that forward hooks are registered in, of every module and of all modules together."""
    found = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    for module in model.modules():
        found += [module._forward_hooks, module._forward_pre_hooks]
    return found
