"""Where a model computes, also where accelerate has put its parameters elsewhere.

Contract: nothing here changes a model. accelerate's hooks (`device_map`, `cpu_offload`, `disk_offload`) bring weights
and inputs of a module to the hook's execution device for the time of its forward; a parameter that is offloaded lies
on the "meta" device in between, so its own device says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .packed_metadata import PackingError


def input_device(model) -> torch.device:
    """Where a model takes its token ids: where its input embeddings are computed.

    Raises:
        PackingError: they are on the meta device, and no hook loads them.
    """
    embeddings = model.get_input_embeddings()
    for module, device in _modules(model, None):
        if module is embeddings and device is not None:
            return torch.empty(0, device=device).device  # "cuda" and 0 become cuda:0
    device = embeddings.weight.device
    if device.type == "meta":
        raise PackingError(
            f"{type(model).__name__} has parameters on the meta device and no accelerate hook that loads them"
        )
    return device


def placement(model) -> tuple:
    """Execution device and dtype of every parameter: equal as long as a model computes the same way at the same places.

    The devices are as accelerate was given them: numbers, names or torch devices.
    """
    return tuple(
        (parameter.device if device is None else device, parameter.dtype)
        for module, device in _modules(model, None)
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _modules(module: torch.nn.Module, device) -> Iterator[tuple[torch.nn.Module, object]]:
    """Every module below one, with the execution device of the nearest hook at or above it, None without one."""
    hook = module.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):  # a SequentialHook has several
        own = getattr(one, "execution_device", None)
        device = device if own is None else own
    yield module, device
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child, device)
