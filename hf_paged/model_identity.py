"""Which model something was measured on, told from its config and a sample of its weights.

Contract: `ModelIdentity.of(model)` reads `SAMPLES` numbers of every weight inside the decoder's layers, by position;
`of_config(config)` knows the config alone. `difference(other)` says in words what makes another model of it, or None.

What it can tell: another architecture, another size, other rotary frequencies; weights that differ by more than a
thousandth of their size in any one matrix, which a fine-tuned or merged model's do, and so do active adapters. Path,
device, attention implementation and code around the decoder do not matter, and neither does the dtype: where two
dtypes are compared, the bound is above the rounding error of bfloat16.

What it cannot tell: weights that differ by less (half a percent between dtypes), or only in numbers that were not
sampled; embeddings and the head, which are left out because users resize them; weights that are packed in less than
16 bits, or on the meta device, which are not compared. Of a config alone it cannot tell one fine-tuned model from
another.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import torch

from .kv_shapes import text_config

SAMPLES = 64  # of each weight
SAME_DTYPE, OTHER_DTYPE = 1e-3, 5e-3  # root mean square of the difference, relative to that of the weight
_FIELDS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_kv_shared_layers"),
)
_ROPE = ("rope_type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor")
_IN_LAYER = re.compile(r"(?:^|\.)\d+\.")


@dataclass(frozen=True, eq=False)
class ModelIdentity:
    """What is known of a model.

    Attributes:
        config: settings that decide what a layer caches.
        dtype: of the weights; None where only the config is known.
        samples: name of a weight -> `[SAMPLES]` float32.
    """

    config: dict
    dtype: str | None = None
    samples: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model) -> ModelIdentity:
        """The identity of a model with weights."""
        decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else model
        weights = {name: weight for name, weight in decoder.named_parameters() if _IN_LAYER.search(name)}
        samples: dict[str, torch.Tensor] = {}
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        dtypes = set()
        with torch.no_grad():
            for name, weight in weights.items():
                if not _comparable(weight):
                    continue
                dtypes.add(str(weight.dtype).removeprefix("torch."))
                # An odd factor spreads the positions over rows and columns alike.
                at = (torch.arange(SAMPLES) * 0x9E3779B1 + 12345) % weight.numel()
                taken = weight.detach().reshape(-1)[at.to(weight.device)].float()
                by_device.setdefault(weight.device, {})[name] = taken
            for found in by_device.values():  # one transfer a device
                samples.update(zip(found, torch.stack(list(found.values())).cpu(), strict=True))
        return cls(_settings(model.config), "+".join(sorted(dtypes)) or None, samples)

    @classmethod
    def of_config(cls, config) -> ModelIdentity:
        """The identity of a model whose weights are not at hand."""
        return cls(_settings(config))

    def difference(self, other: ModelIdentity) -> str | None:
        """What makes `other` another model, in words; None where nothing known does."""
        for name, mine in self.config.items():
            theirs = other.config.get(name)
            if mine is not None and theirs is not None and mine != theirs:
                return f"its {name} is {theirs}, not {mine}"
        if not self.samples or not other.samples:
            return None
        added = [name for name in other.samples if name not in self.samples]
        if added:
            return f"it has a weight {added[0]!r} that the other lacks (an adapter?)"
        common = [name for name in self.samples if name in other.samples]
        mine = torch.stack([self.samples[name] for name in common])
        theirs = torch.stack([other.samples[name] for name in common])
        size = mine.square().mean(-1).sqrt().clamp(min=1e-12)
        off = (theirs - mine).square().mean(-1).sqrt() / size
        bound = SAME_DTYPE if self.dtype == other.dtype else OTHER_DTYPE
        worst = int(off.nan_to_num(nan=torch.inf).argmax())
        if not off[worst] <= bound:
            return f"its weights are others: {common[worst]!r} differs by {float(off[worst]):.2%} of its size"
        return None

    def to_json(self) -> str:
        """Everything but the samples' numbers."""
        return json.dumps({"config": self.config, "dtype": self.dtype, "weights": list(self.samples)})

    @classmethod
    def from_json(cls, text: str, numbers: torch.Tensor | None) -> ModelIdentity:
        """The identity that `to_json` wrote; `numbers [weights, SAMPLES]` float32."""
        known = json.loads(text)
        samples = {} if numbers is None else dict(zip(known["weights"], numbers, strict=True))
        return cls(known["config"], known["dtype"], samples)

    def numbers(self) -> torch.Tensor | None:
        """The samples as one tensor, in the order that `to_json` names them."""
        return torch.stack(list(self.samples.values())) if self.samples else None


def _comparable(weight: torch.Tensor) -> bool:
    """Whether single numbers of a weight mean something and are here."""
    here = weight.device.type != "meta" and weight.numel() > 0 and not hasattr(weight, "placements")
    return here and type(weight.data) is torch.Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1


def _settings(config) -> dict:
    text = text_config(config)
    found = {name: getattr(text, name, None) for name in _FIELDS}
    for name in _ROPE:
        values = _rope_values(getattr(text, "rope_parameters", None), name)
        found[name] = values[0] if len(set(values)) == 1 else sorted(values, key=str) or None
    return json.loads(json.dumps(found, default=str))


def _rope_values(parameters, name: str) -> list:
    """Values of one setting, which some models have for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for part in parameters.values() if isinstance(part, dict) for value in _rope_values(part, name)]
    own = parameters.get(name)
    if isinstance(own, int | float) and not isinstance(own, bool):
        own = float(own)
    return nested + ([own] if own is not None else [])
