"""Fixed scales of 8-bit keys and values, measured beforehand: a file of them, and which model they belong to.

Contract: `KVScales` holds float32 scales of keys, of values, or of both, one tensor a layer; a stored code times its
scale is the value. It comes from `calibrate_kv_scales`, from the file that wrote, or from the `k_scale` and `v_scale`
tensors of a checkpoint. It never fills in what is missing: a layer without scales, scales of another format or
granularity than the cache has, and scales of another model are refused. What counts as another model, and what cannot
be told, says `model_identity`.

The file is safetensors: tensors `layers.N.k_scale`, `layers.N.v_scale` and `identity.samples`; the rest is metadata.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .checkpoint_scales import read_checkpoint_scales
from .config import PagedCacheConfig
from .kv_format import FORMATS, STATIC, KVFormat
from .kv_shapes import layers_with_kv
from .model_identity import ModelIdentity

FORMAT, VERSION = "hf_paged.kv_scales", 1
_DIMS = {"per_tensor": 0, "per_head": 1, "per_channel": 2}
_CALIBRATE = "hf_paged.calibrate_kv_scales(model, dataset, output=...)"


@dataclass(frozen=True, eq=False)
class KVScales:
    """Fixed scales of each layer.

    Attributes:
        key, value: layer -> float32 on the CPU, `[]` for per_tensor, `[num_kv_heads]` for per_head and
            `[num_kv_heads, head_dim_k]` for per_channel, which is for keys alone. Empty where that side has none.
        key_dtype, value_dtype: the 8-bit format that the scales are for; None for a side without.
        key_granularity, value_granularity: what shares a scale; None for a side without.
        identity: the model that they were measured on; None where a file does not tell.
        calibration: what they were measured on, for people to read.
    """

    key: Mapping[int, torch.Tensor]
    value: Mapping[int, torch.Tensor]
    key_dtype: str | None = None
    value_dtype: str | None = None
    key_granularity: str | None = None
    value_granularity: str | None = None
    identity: ModelIdentity | None = None
    calibration: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.key and not self.value:
            raise ValueError("KVScales need scales of keys or of values, got neither")
        for side, scales, dtype, granularity in self._sides():
            if not scales:
                continue
            if dtype not in FORMATS or granularity not in STATIC or (side == "value" and granularity == "per_channel"):
                raise ValueError(f"scales of {side}s cannot be {granularity!r} of {dtype!r}")
            for layer_idx, scale in scales.items():
                _check_scale(f"{side} scale of layer {layer_idx}", scale, granularity)

    def _sides(self):
        yield "key", self.key, self.key_dtype, self.key_granularity
        yield "value", self.value, self.value_dtype, self.value_granularity

    def __repr__(self) -> str:
        sides = [
            f"{side}s: {len(scales)} layers {kind} {dtype}" for side, scales, dtype, kind in self._sides() if scales
        ]
        return f"KVScales({'; '.join(sides)})"

    def layer(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`k_scale` and `v_scale` of a layer, in the shapes that the class names; None for a side that has none.

        Raises:
            ValueError: the layer is missing.
        """
        return tuple(self._of_layer(side, scales, layer_idx) if scales else None for side, scales, *_ in self._sides())

    def _of_layer(self, side: str, scales: Mapping[int, torch.Tensor], layer_idx: int) -> torch.Tensor:
        if layer_idx not in scales:
            raise ValueError(
                f"kv_scales have no {side} scale for layer {layer_idx}, only for {sorted(scales)}; "
                f"run {_CALIBRATE}, or keep that layer in the model's dtype with skip_layers"
            )
        return scales[layer_idx]

    def check(self, model=None, config=None) -> None:
        """Refuse scales that were measured on another model.

        Args:
            model: compared by its config and its weights.
            config: compared where there is no model at hand.

        Raises:
            ValueError: they were, with what tells them apart.
        """
        if self.identity is None or (model is None and config is None):
            return
        other = ModelIdentity.of(model) if model is not None else ModelIdentity.of_config(config)
        difference = self.identity.difference(other)
        if difference is not None:
            raise ValueError(
                f"these kv_scales were measured on another model: {difference}; run {_CALIBRATE} for this one"
            )

    def check_format(self, layer_idx: int, wanted: KVFormat, source="given") -> None:
        """Refuse scales that are not what a layer of this format takes.

        Args:
            source: where they come from, for the message.

        Raises:
            ValueError: they are of another format or granularity, or the layer is missing.
        """
        for side, scales, dtype, granularity in self._sides():
            need = getattr(wanted, f"{side}_granularity")
            if need not in STATIC:
                continue
            have, want = (granularity, dtype), (need, getattr(wanted, f"{side}_dtype"))
            if scales and have != want:
                raise ValueError(
                    f"kv_scales={str(source)!r} hold {have[0]} scales of {side}s for {have[1]}, layer {layer_idx} "
                    f"needs {want[0]} for {want[1]}; set kv_scale_granularity and kv_cache_dtype to what they hold, "
                    f"or run {_CALIBRATE}"
                )
            if not scales:
                raise ValueError(
                    f"kv_scales={str(source)!r} hold no scales of {side}s, layer {layer_idx} needs {want[0]} ones for "
                    f"{want[1]}; run {_CALIBRATE}"
                )
            self._of_layer(side, scales, layer_idx)

    def digest(self) -> str:
        """16 hex digits, equal for equal scales alone: blocks of other scales must not be mistaken for one's own."""
        content = hashlib.sha256()
        for side, scales, dtype, granularity in self._sides():
            content.update(f"{side} {dtype} {granularity};".encode())
            for layer_idx in sorted(scales):
                content.update(f"{layer_idx} {tuple(scales[layer_idx].shape)};".encode())
                content.update(scales[layer_idx].numpy().tobytes())
        return content.hexdigest()[:16]

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to one safetensors file, which appears whole or not at all."""
        from . import __version__

        tensors = {f"layers.{i}.k_scale": scale for i, scale in self.key.items()}
        tensors |= {f"layers.{i}.v_scale": scale for i, scale in self.value.items()}
        about = {"format": FORMAT, "format_version": str(VERSION), "hf_paged_version": __version__}
        names = ("key_dtype", "value_dtype", "key_granularity", "value_granularity")
        about |= {name: value for name in names if (value := getattr(self, name)) is not None}
        about["calibration"] = json.dumps(self.calibration)
        if self.identity is not None:
            about["identity"] = self.identity.to_json()
            if self.identity.samples:
                tensors["identity.samples"] = self.identity.numbers()
        path = Path(path)
        part = path.with_name(f"{path.name}.part-{os.getpid()}")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata=about)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> KVScales:
        """Scales from a file of `save`, or from the `k_scale` and `v_scale` tensors of a checkpoint.

        Args:
            path: such a file; or a model's folder, its index, or one of its safetensors files.

        Raises:
            ValueError: there is nothing of the kind, or the file is damaged or of a newer version.
        """
        path = Path(path).expanduser()
        if not path.exists():
            raise ValueError(f"kv_scales={str(path)!r} does not exist; {_CALIBRATE} writes such a file")
        try:
            own = cls._load_own(path) if path.is_file() and path.suffix != ".json" else None
            return own if own is not None else cls(**read_checkpoint_scales(path))
        except SafetensorError as error:
            raise ValueError(f"kv_scales={str(path)!r} is no safetensors file: {error}") from error

    @classmethod
    def _load_own(cls, path: Path) -> KVScales | None:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                return None
            version = about.get("format_version")
            if version != str(VERSION):
                raise ValueError(
                    f"kv_scales={str(path)!r} is of format version {version} (hf_paged "
                    f"{about.get('hf_paged_version')}), this hf_paged reads version {VERSION}; run {_CALIBRATE} again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        numbers = tensors.pop("identity.samples", None)
        sides: dict[str, dict[int, torch.Tensor]] = {"k_scale": {}, "v_scale": {}}
        for name, tensor in tensors.items():
            _, layer_idx, which = name.split(".")
            sides[which][int(layer_idx)] = tensor
        names = ("key_dtype", "value_dtype", "key_granularity", "value_granularity")
        return cls(
            sides["k_scale"],
            sides["v_scale"],
            **{name: about.get(name) for name in names},
            identity=ModelIdentity.from_json(about["identity"], numbers) if "identity" in about else None,
            calibration=json.loads(about.get("calibration", "{}")),
        )


def for_cache(cache_config: PagedCacheConfig | Mapping | None, model=None, model_config=None) -> KVScales | None:
    """The scales that a cache with these settings takes; None where it takes none.

    Args:
        model, model_config: what will run over the cache, as far as known.

    Raises:
        ValueError: `kv_scales` is no file of scales, they are of another model, format or granularity, or a layer
            that needs them is missing.
    """
    cache_config = PagedCacheConfig.from_any(cache_config)
    source = cache_config.kv_scales
    if source is None:  # the config itself refuses static granularities without a file
        return None
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".json":
        state = path.stat()
        scales = _loaded(path.absolute(), (state.st_ino, state.st_mtime_ns, state.st_size))
    else:
        scales = KVScales.load(path)
    if model_config is None and model is not None:
        model_config = model.config
    scales.check(model, model_config)
    layers = layers_with_kv(model_config) if model_config is not None else sorted({*scales.key, *scales.value})
    for layer_idx in layers:
        scales.check_format(layer_idx, cache_config.formats.format_of(layer_idx), source)
    return scales


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, state: tuple[int, ...]) -> KVScales:
    """A file that is read once for all caches, until it changes."""
    return KVScales.load(path)


def _check_scale(what: str, scale, granularity: str) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32 or scale.device.type != "cpu":
        raise ValueError(f"{what} must be a float32 tensor on the CPU, got {scale!r}")
    if scale.dim() != _DIMS[granularity]:
        raise ValueError(f"{what} has {scale.dim()} dimensions, {granularity} has {_DIMS[granularity]}")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{what} must be positive and finite, got {scale.flatten()[:8].tolist()}")
