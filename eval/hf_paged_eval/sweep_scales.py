"""Scales for the formats of a sweep that need fixed ones: measured once a format, on text that is not scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hf_paged

from .gate_words import candidate_name
from .sweep import needs_scales


def with_scales(
    model: Any, config: Mapping, documents: Callable[[], Sequence[Sequence[int]]], folder: str | Path
) -> dict:
    """A cache config that is complete: where it needs fixed scales and names no file, one is made.

    Args:
        model: whose keys and values are measured.
        config: a cache config.
        documents: gives the token ids to calibrate on; called only where that is needed.
        folder: for the file, under `scales`.
    Raises:
        ValueError: as `calibrate_kv_scales` raises it.
    """
    if not needs_scales(config):
        return dict(config)
    slug = candidate_name({**config, "skip_layers": ()}).replace(":", "-").replace(",", "_").replace(" ", "-")
    file = Path(folder) / "scales" / f"{slug}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    hf_paged.calibrate_kv_scales(
        model,
        documents(),
        kv_cache_dtype=config["kv_cache_dtype"],
        kv_scale_granularity=config["kv_scale_granularity"],
        num_samples=None,
        progress_bar=False,
        output=file,
    )
    return {**config, "kv_scales": str(file)}
