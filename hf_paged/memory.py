"""How much memory keys and values take, worked out from a model's config before anything is loaded.

Contract: `memory_report` compares a padded static cache, blocks in the model's dtype, and blocks in 8 bits. A token
takes, in each layer that keeps keys and values, num_kv_heads * (head_dim_k + head_dim_v) numbers (2 * layers *
num_kv_heads * head_dim for the usual model), and the scales beside them. A layer with a sliding window keeps no more
than its window; layers that hold a recurrent state alone keep none. Weights, activations and recurrent states are not
counted. Tests hold the figures against storages of real caches.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from .kv_format import SCALE_BYTES, STATIC, FormatPlan, KVFormat, join
from .kv_shapes import KVShape, kv_shapes, text_config

_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that cache alike.

    Attributes:
        num_layers: how many they are.
        num_kv_heads, head_dim_k, head_dim_v, sliding_window: as in KVShape.
        kv_cache_dtype: of keys and values.
        token_bytes: of one token in all of these layers, scales beside it included.
        tokens_per_request: for which a request takes room.
        blocks_per_request: in which they lie; None without blocks.
        scale_bytes: of fixed scales, once for all requests.
    """

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    sliding_window: int
    kv_cache_dtype: str
    token_bytes: int
    tokens_per_request: int
    blocks_per_request: int | None
    scale_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """One way to keep keys and values.

    Attributes:
        name: "padded static", "paged", or "paged" with its 8-bit format.
        groups: of layers.
        bytes_per_token: of a token in all layers.
        bytes_per_request: room that a request takes.
        blocks_per_request: of all groups; None without blocks.
        batch_bytes: of the whole batch, fixed scales included.
        requests: how many requests fit in the memory that was asked about; None where none was.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    bytes_per_token: int
    bytes_per_request: int
    blocks_per_request: int | None
    batch_bytes: int
    requests: int | None


@dataclass(frozen=True)
class MemoryReport:
    """The plans side by side, and what was asked."""

    model_type: str
    dtype: str
    dtype_is_assumed: bool
    seq_len: int
    mean_len: int
    batch: int
    block_size: int
    memory: int | None
    layers_without_kv: int
    plans: tuple[MemoryPlan, ...]

    def to_dict(self) -> dict:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)

    def table(self) -> Table:
        """For people."""
        lengths = f"{self.seq_len:,} tokens" + f", {self.mean_len:,} on average" * (self.mean_len != self.seq_len)
        dtype = self.dtype + " (assumed)" * self.dtype_is_assumed
        table = Table(
            "", *(plan.name for plan in self.plans), title=f"KV cache of {self.model_type}, {dtype}: {lengths}"
        )
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row("a token, all layers", *(format_size(plan.bytes_per_token) for plan in self.plans))
        table.add_row("a request", *(format_size(plan.bytes_per_request) for plan in self.plans))
        blocks = (f"{plan.blocks_per_request:,}" if plan.blocks_per_request is not None else "-" for plan in self.plans)
        table.add_row(f"blocks of {self.block_size} tokens, a request", *blocks)
        table.add_row(
            f"{self.batch:,} request{'s' * (self.batch != 1)}", *(format_size(p.batch_bytes) for p in self.plans)
        )
        if self.memory is not None:
            table.add_row(f"requests in {format_size(self.memory)}", *(f"{plan.requests:,}" for plan in self.plans))
        return table


def memory_report(
    model,
    *,
    seq_len: int,
    batch: int = 1,
    mean_len: int | None = None,
    kv_cache_dtype: str | Mapping[str, str] = "fp8_e4m3",
    kv_scale_granularity: str | Mapping[str, str] = "per_token_head",
    skip_layers=(),
    block_size: int = 16,
    dtype: str | torch.dtype | None = None,
    memory: int | str | None = None,
) -> MemoryReport:
    """Bytes of keys and values for a padded static cache, a paged one, and a paged one in 8 bits.

    Args:
        model: a config; a model's folder, or a file config.json; a Hub name; or a model.
        seq_len: tokens of the longest request, which a padded cache keeps room for in every row.
        batch: requests.
        mean_len: tokens of a request on average, which is what blocks hold; `seq_len` if not given.
        kv_cache_dtype, kv_scale_granularity, skip_layers, block_size: as in PagedCacheConfig.
        dtype: of the model; the config's own if not given, bfloat16 where it has none.
        memory: bytes for keys and values, or such as "16GiB", to see how many requests fit.

    Raises:
        ValueError: a value is out of its bounds, or the config does not tell what a layer caches.
        OSError: there is no such config.
    """
    for name, value in (("seq_len", seq_len), ("batch", batch), ("mean_len", mean_len), ("block_size", block_size)):
        if (value is not None or name != "mean_len") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    mean_len = seq_len if mean_len is None else mean_len
    if mean_len > seq_len:
        raise ValueError(f"mean_len={mean_len} is more than seq_len={seq_len}, which is the longest request's")
    memory = parse_size(memory) if memory is not None else None
    config = _config(model)
    own, assumed = _dtype(dtype, model, config)
    shapes = kv_shapes(config)
    formats = _formats(kv_cache_dtype, kv_scale_granularity, skip_layers)
    formats.check_layers(shape.layer_idx for shape in shapes if shape.in_blocks)
    plain = FormatPlan.of("auto", "per_token_head", (), None)

    def plan(name: str, formats: FormatPlan, length: int, block_size: int | None) -> MemoryPlan:
        groups = _groups(shapes, formats, own.itemsize, length, block_size)
        each = sum(group.token_bytes * group.tokens_per_request for group in groups)
        fixed = sum(group.scale_bytes for group in groups)
        blocks = [group.blocks_per_request or 0 for group in groups]
        return MemoryPlan(
            name=name,
            groups=groups,
            bytes_per_token=sum(group.token_bytes for group in groups),
            bytes_per_request=each,
            blocks_per_request=sum(blocks) if block_size is not None else None,
            batch_bytes=batch * each + fixed,
            requests=None if memory is None else max(0, memory - fixed) // each if each else 0,
        )

    plans = [plan("padded static", plain, seq_len, None), plan("paged", plain, mean_len, block_size)]
    if formats.is_quantized:
        plans.append(plan(f"paged, {join(formats.kv_cache_dtype)}", formats, mean_len, block_size))
    text = text_config(config)
    return MemoryReport(
        model_type=text.model_type,
        dtype=str(own).removeprefix("torch."),
        dtype_is_assumed=assumed,
        seq_len=seq_len,
        mean_len=mean_len,
        batch=batch,
        block_size=block_size,
        memory=memory,
        layers_without_kv=text.num_hidden_layers - len(shapes),
        plans=tuple(plans),
    )


def _groups(
    shapes: tuple[KVShape, ...], formats: FormatPlan, itemsize: int, length: int, block_size: int | None
) -> tuple[LayerGroup, ...]:
    """Layers with one shape and format together, and what a request of `length` tokens holds in them as it decodes."""
    alike = Counter(
        (shape[1:], formats.format_of(shape.layer_idx) if shape.in_blocks else KVFormat()) for shape in shapes
    )
    groups = []
    for ((heads, head_dim_k, head_dim_v, window, in_blocks), fmt), count in alike.items():
        tokens = min(length, window or length)
        blocks = None
        if block_size is not None and in_blocks:
            blocks = -(-length // block_size)
            if window:  # as many blocks as `window` tokens may touch, wherever they begin
                blocks = min(blocks, -(-(window - 1) // block_size) + 1)
            tokens = blocks * block_size
        fixed = {"per_tensor": heads, "per_head": heads, "per_channel": heads * head_dim_k}
        scales = fixed.get(fmt.key_granularity, 0) + fixed.get(fmt.value_granularity, 0)
        groups.append(
            LayerGroup(
                num_layers=count,
                num_kv_heads=heads,
                head_dim_k=head_dim_k,
                head_dim_v=head_dim_v,
                sliding_window=window,
                kv_cache_dtype=join((fmt.key_dtype, fmt.value_dtype)),
                token_bytes=count * fmt.token_bytes(heads, head_dim_k, head_dim_v, itemsize),
                tokens_per_request=tokens,
                blocks_per_request=blocks,
                scale_bytes=count * scales * SCALE_BYTES,
            )
        )
    return tuple(groups)


def _formats(kv_cache_dtype, kv_scale_granularity, skip_layers) -> FormatPlan:
    static = any(word in str(kv_scale_granularity) for word in STATIC)
    return FormatPlan.of(kv_cache_dtype, kv_scale_granularity, skip_layers, "calibration" if static else None)


def _config(model) -> PreTrainedConfig:
    if isinstance(model, str | os.PathLike):
        return AutoConfig.from_pretrained(model)
    return model if isinstance(model, PreTrainedConfig) else getattr(model, "config", model)


def _dtype(dtype, model, config) -> tuple[torch.dtype, bool]:
    """The dtype that a model computes keys and values in, and whether that is a guess."""
    found = dtype if dtype is not None else getattr(model, "dtype", None)
    if not isinstance(found, str | torch.dtype):
        found = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    assumed = found is None
    found = torch.bfloat16 if assumed else found
    found = getattr(torch, found.removeprefix("torch."), None) if isinstance(found, str) else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype such as 'bfloat16', got {dtype!r}")
    return found, assumed


def parse_size(size: int | str) -> int:
    """Bytes of a number, or of such as "16GiB", "80 GB", "512MiB".

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = match and match[2].upper()
    if match is None or unit not in _UNITS or isinstance(size, bool):
        raise ValueError(f"memory must be bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, got {size!r}")
    return int(float(match[1]) * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """Bytes for people, in binary units."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:,.2f} {unit}"
