"""Fixed scales of 8-bit keys and values, measured on a data set.

Contract: `calibrate_kv_scales` runs the model over each text alone, so that no padding exists, and looks at keys and
values as a cache is given them: behind rotary embeddings and norms, latents where the model caches latents. All tokens
of all texts count alike; their order, and which of them comes first, do not matter. The model keeps its mode and its
weights; nothing but the scales is left.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

import hf_paged_kernels as kernels

from .kv_format import DYNAMIC, FORMATS, STATIC, FormatPlan
from .kv_pages import TORCH_DTYPES
from .kv_scales import KVScales
from .kv_shapes import layers_with_kv
from .model_identity import ModelIdentity
from .placement import input_device

logger = logging.get_logger(__name__)

# "mse" tries the largest magnitude times these as the end of the format's range. Below 1 rare values saturate and the
# others get finer steps; above 1 the steps of an fp8 format, which double at powers of two, fall elsewhere.
WIDTHS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.125, 1.25, 1.5, 1.75)
_FEW_TOKENS = 2048
# A channel that was silent in the data may speak later: its range is at least this share of its head's.
_SILENT = 2.0**-8


def calibrate_kv_scales(
    model,
    dataset: Iterable,
    *,
    tokenizer=None,
    kv_cache_dtype: str | Mapping[str, str] = "fp8_e4m3",
    kv_scale_granularity: str | Mapping[str, str] = "per_head",
    num_samples: int | None = 128,
    max_length: int = 1024,
    text_column: str = "text",
    method: str = "amax",
    margin: float | None = None,
    output: str | os.PathLike | None = None,
    progress_bar: bool = True,
) -> KVScales:
    """Measure fixed scales of keys and values, for `PagedCacheConfig(kv_scales=...)`.

    Args:
        model: a decoder-only transformers model.
        dataset: texts, which need a `tokenizer`; lists or one-dimensional tensors of token ids; or rows of a `datasets`
            data set, with a column `input_ids` (and `attention_mask`, whose zeros are left out) or `text_column`.
        tokenizer: makes token ids of texts.
        kv_cache_dtype, kv_scale_granularity: as in PagedCacheConfig. A side whose granularity is per_token_head, or
            whose dtype is "auto", needs no scales and gets none.
        num_samples: how many texts to take, from the front; None for all.
        max_length: tokens of a text that are taken.
        method: "amax" makes the largest magnitude the end of the format's range. "mse" tries smaller and larger ranges,
            too, and takes the one with the least squared error, which costs a second pass.
        margin: factor on the range, for later traffic that goes beyond what was seen. None means 1 with "mse"; with
            "amax" 1.25 for fp8, which has room to spare, 1.1 for int8 and each channel, 1 for int8 otherwise.
        output: a file to save the scales to.
        progress_bar: whether to show one, on stderr.

    Raises:
        ValueError: an argument is wrong, the data set holds no token, or the model gives numbers that are not finite.
    """
    fmt = _static_format(kv_cache_dtype, kv_scale_granularity)
    for name, value in (("num_samples", num_samples), ("max_length", max_length)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1{' or None' * (name == 'num_samples')}, got {value!r}")
    if method not in ("amax", "mse"):
        raise ValueError(f"method must be 'amax' or 'mse', got {method!r}")
    if margin is not None and (
        isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < float("inf")
    ):
        raise ValueError(f"margin must be a number > 0 or None, got {margin!r}")
    layers = layers_with_kv(model.config)
    samples = list(itertools.islice(_token_ids(dataset, tokenizer, text_column, max_length), num_samples))
    if not samples:
        raise ValueError("the data set holds no token to calibrate on")
    tokens = sum(map(len, samples))
    if tokens < _FEW_TOKENS:
        logger.warning(f"calibrating on {tokens} tokens; fixed scales want some thousands, as varied as the traffic")

    largest = _Largest()
    _run(model, samples, largest, "Calibrating", progress_bar)
    ranges = {side: _ranges(fmt, side, getattr(largest, side), layers) for side in ("key", "value")}
    if method == "mse":
        errors = _Errors(fmt, ranges)
        _run(model, samples, errors, "Choosing ranges", progress_bar)
        ranges = errors.best()
    margins = {side: _margin(fmt, side, method) if margin is None else margin for side in ranges}
    scales = KVScales(
        **{side: _scales(_dtype(fmt, side), found, margins[side]) for side, found in ranges.items()},
        key_dtype=fmt.key_dtype if ranges["key"] else None,
        value_dtype=fmt.value_dtype if ranges["value"] else None,
        key_granularity=fmt.key_granularity if ranges["key"] else None,
        value_granularity=fmt.value_granularity if ranges["value"] else None,
        identity=ModelIdentity.of(model),
        calibration={
            "dataset": _name(dataset),
            "samples": len(samples),
            "tokens": tokens,
            "max_length": max_length,
            "method": method,
            "margin": {side: margins[side] for side in ranges if ranges[side]},
        },
    )
    if output is not None:
        scales.save(output)
    return scales


def _static_format(kv_cache_dtype, kv_scale_granularity):
    static = any(word in str(kv_scale_granularity) for word in STATIC)
    plan = FormatPlan.of(kv_cache_dtype, kv_scale_granularity, (), "to be measured" if static else None)
    fmt = plan.format_of(0)
    if not fmt.is_static:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} with kv_scale_granularity={kv_scale_granularity!r} needs no calibration"
        )
    return fmt


def _dtype(fmt, side: str) -> torch.dtype | None:
    """The format of a side that needs scales; None for another."""
    name, granularity = getattr(fmt, f"{side}_dtype"), getattr(fmt, f"{side}_granularity")
    return TORCH_DTYPES[name] if name in FORMATS and granularity not in (None, DYNAMIC) else None


# What is measured


class _Largest:
    """Largest magnitude of each channel of each head: layer -> `[num_kv_heads, head_dim]` float32."""

    def __init__(self) -> None:
        self.key: dict[int, torch.Tensor] = {}
        self.value: dict[int, torch.Tensor] = {}

    def see(self, side: str, layer_idx: int, states: torch.Tensor) -> None:
        """Take in `[1, num_kv_heads, T, head_dim]`."""
        seen, new = getattr(self, side), states.detach().abs().amax(dim=(0, 2)).float()
        seen[layer_idx] = torch.maximum(seen[layer_idx], new) if layer_idx in seen else new


class _Errors:
    """Squared error of each range, for each of WIDTHS.

    Args:
        ranges: side -> layer -> the largest magnitude, in the shape of the scales.
    """

    def __init__(self, fmt, ranges: dict[str, dict[int, torch.Tensor]]) -> None:
        self.dtypes = {side: _dtype(fmt, side) for side in ranges}
        self.ranges = ranges
        self.sums: dict[tuple[str, int], torch.Tensor] = {}

    def see(self, side: str, layer_idx: int, states: torch.Tensor) -> None:
        largest = self.ranges[side].get(layer_idx)
        if largest is None:
            return
        dtype, x = self.dtypes[side], states.detach().float()[0]  # [num_kv_heads, T, head_dim]
        largest = largest.to(x.device)
        found = []
        for width in WIDTHS:
            scale = largest * width / kernels.QMAX[dtype]
            scale = scale.view(-1, 1, 1) if scale.dim() < 2 else scale[:, None]
            error = (kernels.dequantize(kernels.quantize(x, scale, dtype), scale) - x).square()
            keep = {0: error.sum(), 1: error.sum(dim=(1, 2)), 2: error.sum(dim=1)}
            found.append(keep[largest.dim()].double())
        total = torch.stack(found)
        self.sums[side, layer_idx] = self.sums.get((side, layer_idx), 0) + total

    def best(self) -> dict[str, dict[int, torch.Tensor]]:
        """The ranges with the least error."""
        best: dict[str, dict[int, torch.Tensor]] = {side: {} for side in self.ranges}
        for (side, layer_idx), sums in self.sums.items():
            width = torch.tensor(WIDTHS, device=sums.device)[sums.argmin(0)]
            best[side][layer_idx] = self.ranges[side][layer_idx] * width.cpu()
        return best


class _Watched(DynamicCache):
    """The model's own cache, whose new keys and values somebody looks at."""

    def __init__(self, config, observer) -> None:
        super().__init__(config=config)
        self._observer = observer

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._observer.see("key", layer_idx, key_states)
        self._observer.see("value", layer_idx, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _run(model, samples: list[list[int]], observer, what: str, progress_bar: bool) -> None:
    """One forward for each sample, in evaluation mode; modes are put back."""
    device = input_device(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    less = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(base.forward).parameters else {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), tqdm(samples, what, unit="text", file=sys.stderr, disable=not progress_bar) as bar:
            for sample in bar:
                cache = _Watched(model.config.get_text_config(decoder=True), observer)
                ids = torch.tensor([sample], device=device)
                model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **less)
    finally:
        for module in training:
            module.training = True


def _ranges(fmt, side: str, largest: dict[int, torch.Tensor], layers) -> dict[int, torch.Tensor]:
    """Largest magnitude of whatever shares a scale, on the CPU; empty for a side that needs none."""
    if _dtype(fmt, side) is None:
        return {}
    if not largest:
        raise ValueError("the model gave its cache no keys and values; does it use one?")
    found = {}
    for layer_idx in sorted(set(largest) & set(layers)):
        channels = largest[layer_idx].cpu()
        if not bool(channels.isfinite().all()):
            raise ValueError(f"layer {layer_idx} gives {side}s that are not finite; scales cannot be measured")
        heads = channels.amax(-1).clamp(min=float(channels.max()) * _SILENT)
        by_granularity = {
            "per_tensor": channels.max(),
            "per_head": heads,
            "per_channel": torch.maximum(channels, heads[:, None] * _SILENT),
        }
        found[layer_idx] = by_granularity[getattr(fmt, f"{side}_granularity")]
    return found


def _margin(fmt, side: str, method: str) -> float:
    """The default: what lost least on text that was not calibrated on (docs/fp8_kv_cache.md)."""
    if method == "mse":
        return 1.0
    if getattr(fmt, f"{side}_dtype") != "int8":
        return 1.25
    return 1.1 if getattr(fmt, f"{side}_granularity") == "per_channel" else 1.0


def _scales(dtype: torch.dtype | None, ranges: dict[int, torch.Tensor], margin: float) -> dict[int, torch.Tensor]:
    return {
        layer_idx: (largest * margin / kernels.QMAX[dtype]).clamp(min=kernels.SMALLEST_SCALE)
        for layer_idx, largest in ranges.items()
    }


# The data set


def _token_ids(dataset, tokenizer, text_column: str, max_length: int) -> Iterator[list[int]]:
    """Token ids of each text that has any, at most `max_length`."""
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        raise ValueError(f"dataset must hold several texts or lists of token ids, got {type(dataset).__name__}")
    for number, row in enumerate(dataset):
        ids = _ids_of_row(row, number, tokenizer, text_column, max_length)[:max_length]
        if ids:
            yield ids


def _ids_of_row(row, number: int, tokenizer, text_column: str, max_length: int) -> list[int]:
    if isinstance(row, Mapping):
        if "input_ids" in row:
            ids, mask = _flat(row["input_ids"], number), row.get("attention_mask")
            mask = [1] * len(ids) if mask is None else _flat(mask, number)
            if len(mask) != len(ids):
                raise ValueError(f"row {number} of the data set: {len(ids)} input_ids, attention_mask has {len(mask)}")
            return [token for token, real in zip(ids, mask, strict=True) if real]
        if text_column not in row:
            raise ValueError(
                f"row {number} of the data set has neither input_ids nor {text_column!r}, only {list(row)}"
            )
        row = row[text_column]
    if isinstance(row, str):
        if tokenizer is None:
            raise ValueError(f"row {number} of the data set is a text; give the model's tokenizer")
        return list(tokenizer(row, truncation=True, max_length=max_length)["input_ids"])
    return _flat(row, number)


def _flat(ids, number: int) -> list[int]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, list | tuple) or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"row {number} of the data set must be a text or a list of token ids, got {ids!r:.80}")
    return list(ids)


def _name(dataset) -> str:
    info = getattr(dataset, "info", None)
    return str(getattr(info, "dataset_name", None) or type(dataset).__name__)
