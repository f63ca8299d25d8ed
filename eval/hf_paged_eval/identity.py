"""Which model a number belongs to: its name, its class, and a hash over its weights.

Contract: models with other weights, or the same in another dtype, have another identity. The config is left out, since
versions of transformers write it differently; a setting that changes what the model computes shows as drift of its
perplexity. Nothing of a machine goes in: a folder counts with its last part alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CHUNK = 64 * 2**20  # bytes of a tensor brought to the host at a time


@dataclass(frozen=True)
class ModelIdentity:
    """
    Attributes:
        name: what the model is called; of a folder its last part.
        architecture: the model's class.
        dtype: of the model.
        num_parameters: values in its parameters and buffers, shared ones once.
        weights: "sha256:" and the hash of the weights; "sha256-partly:" where some are offloaded, which count with
            their names and shapes alone.
    """

    name: str
    architecture: str
    dtype: str
    num_parameters: int
    weights: str

    def to_dict(self) -> dict:
        return asdict(self)

    def names(self, asked_for: str | None = None) -> list[str]:
        """What `gates.toml` may call it."""
        return list(dict.fromkeys(name for name in (asked_for, self.name, self.weights) if name))


def display_name(name: str | Path) -> str:
    """A Hub name as it is, a folder without where it lies."""
    path = Path(name)
    return path.resolve().name if path.is_dir() or path.is_absolute() else str(name)


def model_identity(model: Any, name: str | Path | None = None) -> ModelIdentity:
    """Read all weights once (a second for some hundred million).

    Args:
        model: a model of transformers.
        name: what to call it; None for what its config says.
    """
    digest, seen, count, whole = hashlib.sha256(type(model).__name__.encode()), set(), 0, True
    for key, tensor in sorted(model.state_dict(keep_vars=True).items()):
        tensor = tensor.detach()
        here = tensor.device.type != "meta"
        if here and tensor.numel():
            place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if place in seen:  # tied weights
                continue
            seen.add(place)
        count += tensor.numel()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if not here:
            whole = False
            continue
        flat = tensor.reshape(-1)
        step = max(1, CHUNK // tensor.element_size())
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].contiguous().cpu()
            digest.update(piece.view(torch.uint8).numpy().data)
    return ModelIdentity(
        name=display_name(name or getattr(model.config, "_name_or_path", "") or type(model).__name__),
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        num_parameters=count,
        weights=f"{'sha256' if whole else 'sha256-partly'}:{digest.hexdigest()}",
    )
