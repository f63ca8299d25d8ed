"""In which format each layer keeps its keys and values, and how users spell it.

Contract: `FormatPlan.of` turns the five settings of PagedCacheConfig into one canonical form, which is hashable and
compares equal where the same is meant, and answers `format_of(layer)`. It names each value that it refuses and what
is allowed instead. Imports neither torch nor transformers.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import NamedTuple

AUTO = "auto"
FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8")  # of one byte a number
DYNAMIC = "per_token_head"
STATIC = ("per_head", "per_tensor", "per_channel")  # from `kv_scales`
SCALE_BYTES = 4  # a float32


class KVFormat(NamedTuple):
    """What one layer's blocks hold.

    Attributes:
        key_dtype, value_dtype: one of FORMATS, or "auto" for the dtype that the model computes them in.
        key_granularity, value_granularity: what shares a scale, DYNAMIC or one of STATIC; None where there is none.
        rotates_keys: whether keys are rotated before they are rounded.
    """

    key_dtype: str = AUTO
    value_dtype: str = AUTO
    key_granularity: str | None = None
    value_granularity: str | None = None
    rotates_keys: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are kept in 8 bits."""
        return (self.key_dtype, self.value_dtype) != (AUTO, AUTO)

    @property
    def is_static(self) -> bool:
        """Whether a scale comes from calibration."""
        return self.key_granularity in STATIC or self.value_granularity in STATIC

    def token_bytes(self, num_kv_heads: int, head_dim_k: int, head_dim_v: int, itemsize: int) -> int:
        """Bytes of one token in one layer, with the scales that are stored beside it.

        Args:
            itemsize: bytes of a number in the model's dtype.
        """
        total = 0
        for dtype, granularity, head_dim in (
            (self.key_dtype, self.key_granularity, head_dim_k),
            (self.value_dtype, self.value_granularity, head_dim_v),
        ):
            total += head_dim * (itemsize if dtype == AUTO else 1)
            total += SCALE_BYTES if granularity == DYNAMIC else 0
        return num_kv_heads * total


class FormatPlan(NamedTuple):
    """The settings in their canonical form.

    Attributes:
        kv_cache_dtype: (keys, values).
        kv_scale_granularity: (keys, values).
        skip_layers: (layer, (keys, values)) in rising order of the layers that differ.
        rotate_keys: False where keys that could be rotated are not; None everywhere else.
    """

    kv_cache_dtype: tuple[str, str]
    kv_scale_granularity: tuple[str, str]
    skip_layers: tuple[tuple[int, tuple[str, str]], ...]
    rotate_keys: bool | None = None

    @classmethod
    def of(cls, kv_cache_dtype, kv_scale_granularity, skip_layers, kv_scales, rotate_keys=None) -> FormatPlan:
        """The plan that a caller meant.

        Raises:
            ValueError: a value is not one of those allowed, or two of them do not go together.
        """
        dtypes = _both("kv_cache_dtype", kv_cache_dtype, (AUTO, *FORMATS), AUTO)
        granularity = _both("kv_scale_granularity", kv_scale_granularity, (DYNAMIC, *STATIC), DYNAMIC)
        if granularity[1] == "per_channel":
            raise ValueError(
                f"kv_scale_granularity={kv_scale_granularity!r} wants a scale for each channel of values; per_channel "
                f"is for keys alone: 'k:per_channel,v:{DYNAMIC}'"
            )
        plan = cls(dtypes, granularity, _layers(skip_layers))
        plan._check(kv_scale_granularity, kv_scales)
        if rotate_keys is not None and not isinstance(rotate_keys, bool):
            raise ValueError(f"rotate_keys must be True, False or None, got {rotate_keys!r}")
        could = any(kind.rotates_keys for kind in plan._formats())
        if rotate_keys and not could:
            raise ValueError(
                f"rotate_keys=True: with kv_cache_dtype={kv_cache_dtype!r} and kv_scale_granularity="
                f"{kv_scale_granularity!r} no layer keeps keys in 8 bits with a scale for each token and head "
                f"({DYNAMIC}), which are those that can be rotated"
            )
        return plan._replace(rotate_keys=False) if could and rotate_keys is False else plan

    def _formats(self) -> list[KVFormat]:
        """Every format that some layer may have."""
        return [self._format(dtypes) for dtypes in (self.kv_cache_dtype, *(kind for _, kind in self.skip_layers))]

    def _check(self, spelling, kv_scales) -> None:
        kinds = self._formats()
        used = {kind.key_granularity for kind in kinds} | {kind.value_granularity for kind in kinds}
        static = sorted(used & set(STATIC))
        if static and kv_scales is None:
            raise ValueError(
                f"kv_scale_granularity={spelling!r} takes scales that were measured beforehand ({', '.join(static)}), "
                "and kv_scales is None; run hf_paged.calibrate_kv_scales(model, dataset) and pass the file that it "
                f"writes as kv_scales, or use {DYNAMIC!r}, which needs none"
            )
        if kv_scales is not None and not static:
            raise ValueError(
                f"kv_scales={kv_scales!r} are of no use with kv_cache_dtype={join(self.kv_cache_dtype)!r} and "
                f"kv_scale_granularity={spelling!r}; scales from a file are {', '.join(STATIC)}"
            )
        for name, mine, default in zip(("keys", "values"), self.kv_scale_granularity, (DYNAMIC, DYNAMIC), strict=True):
            if mine != default and mine not in used:
                raise ValueError(
                    f"kv_scale_granularity={spelling!r} gives {name} the granularity {mine!r}, but kv_cache_dtype="
                    f"{join(self.kv_cache_dtype)!r} keeps them in the model's dtype, without scales"
                )

    def _format(self, dtypes: tuple[str, str]) -> KVFormat:
        keys, values = (
            None if dtype == AUTO else kind for dtype, kind in zip(dtypes, self.kv_scale_granularity, strict=True)
        )
        # Fixed scales were measured on keys as they are.
        return KVFormat(*dtypes, keys, values, rotates_keys=keys == DYNAMIC and self.rotate_keys is None)

    def format_of(self, layer_idx: int) -> KVFormat:
        """The format of a layer."""
        return self._format(dict(self.skip_layers).get(layer_idx, self.kv_cache_dtype))

    @property
    def is_quantized(self) -> bool:
        """Whether any layer may be kept in 8 bits."""
        return any(kind.is_quantized for kind in self._formats())

    def check_layers(self, layers: Iterable[int]) -> None:
        """Refuse `skip_layers` that names a layer which keeps no keys and values.

        Args:
            layers: those that do.
        Raises:
            ValueError: with the layer and those that there are.
        """
        known = sorted(layers)
        for layer, _ in self.skip_layers:
            if layer not in known:
                raise ValueError(f"skip_layers names layer {layer}; the layers that keep keys and values are {known}")


def join(both: tuple[str, str]) -> str:
    """How a pair is spelled: once where keys and values agree, else "k:...,v:..."."""
    return both[0] if both[0] == both[1] else f"k:{both[0]},v:{both[1]}"


def spell_layers(layers: tuple[tuple[int, tuple[str, str]], ...]) -> tuple:
    """`skip_layers` as a config keeps it: numbers of layers in the model's dtype, and (number, dtype) of others."""
    return tuple(layer if kind == (AUTO, AUTO) else (layer, join(kind)) for layer, kind in layers)


def _both(name: str, value, allowed: tuple[str, ...], default: str) -> tuple[str, str]:
    """(keys, values) of one word, of "k:word,v:word", or of a mapping; a side that is not named has the default."""
    if isinstance(value, str) and ":" in value:
        parts = [part.partition(":")[::2] for part in value.split(",")]
        sides = {side.strip(): word.strip() for side, word in parts}
        if len(sides) < len(parts):
            raise ValueError(f"{name}={value!r} names a side twice")
    elif isinstance(value, str):
        sides = {"k": value.strip(), "v": value.strip()}
    elif isinstance(value, Mapping):
        sides = dict(value)
    else:
        raise ValueError(f"{name} must be a string or a dict of 'k' and 'v', got {value!r}")
    unknown = [side for side in sides if side not in ("k", "v")]
    if unknown or not sides:
        raise ValueError(f"{name}={value!r} must name keys and values as 'k' and 'v', got {unknown or 'neither'}")
    for word in sides.values():
        if word not in allowed:
            raise ValueError(f"{name}={value!r}: {word!r} is not one of {', '.join(map(repr, allowed))}")
    return sides.get("k", default), sides.get("v", default)


def _layers(value) -> tuple[tuple[int, tuple[str, str]], ...]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"skip_layers must be numbers of layers, or a dict of layer -> kv_cache_dtype, got {value!r}")
    else:
        items = [item if isinstance(item, tuple | list) else (item, AUTO) for item in value]
    found: dict[int, tuple[str, str]] = {}
    for item in items:
        if len(item) != 2:
            raise ValueError(f"skip_layers: expected a number or (layer, kv_cache_dtype), got {item!r}")
        layer = _layer(item[0])
        kind = _both(f"skip_layers[{layer}]", item[1], (AUTO, *FORMATS), AUTO)
        if found.setdefault(layer, kind) != kind:
            raise ValueError(f"skip_layers gives layer {layer} two dtypes, {join(found[layer])!r} and {join(kind)!r}")
    return tuple(sorted(found.items()))


def _layer(value) -> int:
    if isinstance(value, str) and value.isdecimal():  # a dict that was JSON has strings for keys
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"skip_layers: each layer must be an integer >= 0, got {value!r}")
    return int(value)
