"""KV scales that a quantised checkpoint brings along, under the names that tools give them.

Contract: `read_checkpoint_scales(path)` gives the arguments of `KVScales`. Read are, for a layer N,

    ...layers.N.self_attn.k_scale, .v_scale              compressed-tensors, llm-compressor
    ...layers.N.self_attn.attn.k_scale                   vLLM's own modules
    ...layers.N.self_attn.k_proj.k_scale, v_proj.v_scale ModelOpt
    ...layers.N.self_attn.k_proj.output_scale            Quark, AutoFP8
    ...layers.N.self_attn.kv_scale                       one for keys and values, AutoFP8

(the last two as vLLM's loader renames them). A scale is one number for the tensor or one a head, and value = code *
scale. Only the scales' bytes are read. The format is e4m3 unless the config's `kv_cache_scheme` says int. The model's
config, where it lies beside, becomes the identity.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open

from .model_identity import ModelIdentity

_NAME = re.compile(
    r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(?P<layer>\d+)\.(?:[\w.]+\.)?(?:self_attn|attn|self_attention|attention|mixer)"
    r"(?:\.attn|\.impl)*(?:\.(?P<proj>[kv]|qkv)_proj)?\.(?P<kind>k_scale|v_scale|kv_scale|output_scale|[kv]_zero_point)$"
)
_INDEX = "model.safetensors.index.json"


def read_checkpoint_scales(path: Path) -> dict:
    """Arguments of KVScales from a model's folder, its index or one safetensors file.

    Raises:
        ValueError: there are none; they differ in shape between layers, contradict each other, or are asymmetric; the
            checkpoint's KV scheme is not one of 8 bits.
    """
    sides: dict[str, dict[int, torch.Tensor]] = {"k": {}, "v": {}}
    for file, names in _files(path):
        with safe_open(file, "pt") as opened:
            for name in opened.keys() if names is None else names:  # noqa: SIM118
                found = _NAME.search(name)
                if found is not None:
                    _take(sides, found, name, opened)
    if not sides["k"] and not sides["v"]:
        raise ValueError(
            f"kv_scales={str(path)!r} hold no k_scale or v_scale tensors; "
            "hf_paged.calibrate_kv_scales(model, dataset, output=...) measures scales"
        )
    folder = path if path.is_dir() else path.parent
    settings = _config(folder)
    dtype = _format(settings, path)
    kinds = {side: _granularity(side, scales) for side, scales in sides.items()}
    return {
        "key": sides["k"],
        "value": sides["v"],
        "key_dtype": dtype if sides["k"] else None,
        "value_dtype": dtype if sides["v"] else None,
        "key_granularity": kinds["k"],
        "value_granularity": kinds["v"],
        "identity": _identity(folder, settings),
        "calibration": {"source": "checkpoint"},
    }


def _files(path: Path):
    """(file, names to look at, or None for all)."""
    index = path / _INDEX if path.is_dir() else path
    if index.name.endswith(".json"):
        if index.exists():
            files: dict[str, list[str]] = {}
            for name, file in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).items():
                if _NAME.search(name):
                    files.setdefault(file, []).append(name)
            return [(index.parent / file, names) for file, names in sorted(files.items())]
        return [(file, None) for file in sorted(path.glob("*.safetensors"))]
    return [(index, None)] if path.is_file() else [(file, None) for file in sorted(path.glob("*.safetensors"))]


def _take(sides: dict[str, dict[int, torch.Tensor]], found: re.Match, name: str, opened) -> None:
    kind, proj, layer_idx = found["kind"], found["proj"], int(found["layer"])
    if kind == "output_scale" and proj not in ("k", "v"):
        return
    tensor = opened.get_tensor(name)
    if kind.endswith("zero_point"):
        if bool(tensor.float().abs().gt(0).any()):
            raise ValueError(f"{name} is not zero: asymmetric KV scales are not supported")
        return
    which = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv", "output_scale": proj}[kind]
    scale = tensor.float().reshape(-1)
    scale = scale[0].clone() if scale.numel() == 1 else scale.contiguous()
    for side in which:
        known = sides[side].setdefault(layer_idx, scale)
        if known.shape != scale.shape or not torch.equal(known, scale):
            raise ValueError(f"{name} contradicts another {side}_scale of layer {layer_idx}")


def _granularity(side: str, scales: dict[int, torch.Tensor]) -> str | None:
    if not scales:
        return None
    kinds = {scale.dim() for scale in scales.values()}
    if len(kinds) > 1:
        raise ValueError(f"the checkpoint's {side}_scale is one number in some layers and one a head in others")
    return "per_tensor" if kinds == {0} else "per_head"


def _config(folder: Path) -> dict:
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _format(settings: dict, path: Path) -> str:
    quantization = settings.get("quantization_config") or settings.get("compression_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    if not isinstance(scheme, dict):
        scheme = {"type": str(scheme)}
    kind, bits = str(scheme.get("type") or scheme.get("dtype") or "float"), scheme.get("num_bits", 8)
    if bits != 8:
        raise ValueError(f"kv_scales={str(path)!r} are for {bits}-bit keys and values, not for 8")
    return "int8" if kind.startswith("int") else "fp8_e4m3"


def _identity(folder: Path, settings: dict) -> ModelIdentity | None:
    if "model_type" not in settings:
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError):  # a model that this transformers does not know: nothing to compare with
        return None
    return ModelIdentity.of_config(config)
