"""Limits of the quality gate: what `gates.toml` says for a model and a kv_cache_dtype.

Contract: a file is checked whole when it is read, and whatever it should not hold is refused by name. Which limits a
model gets: the user's file comes before the package's. In the first file that names the model, or, failing that, in the
user's [default], the model's own values lie over the file's [default], and that over the package's [default].
"""

from __future__ import annotations

import fnmatch
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

BUILT_IN = Path(__file__).with_name("gates.toml")

# Limited metrics, and whether more of it is worse.
METRICS = {"ratio": True, "mean_kld": True, "top1": False}
BUCKETS = ("0-512", "512-1k", "1k-2k", "2k-4k", "4k-8k", "8k+")
FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")
_RANGES = {"ratio": (0.0, math.inf), "mean_kld": (0.0, math.inf), "top1": (0.0, 1.0), "drift": (0.0, math.inf)}


@dataclass(frozen=True)
class Limit:
    """Where a metric becomes worth a warning, and where it fails; None: nowhere."""

    warn: float | None = None
    fail: float | None = None


@dataclass(frozen=True)
class Limits:
    """What holds for one model and dtype.

    Attributes:
        overall: metric -> Limit, over all scored tokens.
        buckets: position bucket -> metric -> Limit.
        min_tokens: with fewer scored tokens nothing is decided.
        drift: of the baseline's perplexity against a stored one, relative.
        source: which sections of which file they come from.
    """

    overall: Mapping[str, Limit] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[str, Limit]] = field(default_factory=dict)
    min_tokens: int = 0
    drift: Limit = Limit()
    source: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def limits_for(names: Sequence[str], kv_cache_dtype: str, config: str | Path | None = None) -> Limits:
    """The limits of a model.

    Args:
        names: what the model is called: as it was asked for, its last part, its identity.
        kv_cache_dtype: as in PagedCacheConfig, spelled as a string.
        config: the user's own file, or None.
    Raises:
        ValueError: a file is wrong, and where.
        OSError: it cannot be read.
    """
    dtype = canonical_dtype(kv_cache_dtype)
    built_in = _read(BUILT_IN)
    files = [(Path(config).name, _read(Path(config)))] if config is not None else []
    files.append(("built-in gates.toml", built_in))
    for label, content in files:
        section = _find(content["models"], names)
        if section is None and (not content["default"] or content is built_in):
            continue
        layers = [built_in["default"]] + (
            [content["default"]] if content is not built_in and content["default"] else []
        )
        source = f"{label} [default]"
        if section is not None:
            own = content["models"][section]
            layers.append(own)
            source = f"{label} [models.{section}]"
            for key, values in own["dtypes"].items():
                if key == dtype:
                    layers.append(values)
                    source = f"{label} [models.{section}.{key}]"
        return _merge(layers, source)
    return _merge([built_in["default"]], "built-in gates.toml [default]")


def canonical_dtype(value: str | Mapping) -> str:
    """One spelling of a kv_cache_dtype: a format, or `k:FORMAT,v:FORMAT` where keys and values differ.

    A side that is not named is "auto", as in PagedCacheConfig.

    Raises:
        ValueError: it names no format.
    """
    if isinstance(value, str) and ":" in value:
        value = dict(part.split(":", 1) if ":" in part else (part, "") for part in value.replace(" ", "").split(","))
    sides = {"k": value, "v": value} if isinstance(value, str) else dict(value)
    pair = (sides.get("k", "auto"), sides.get("v", "auto"))
    if not sides or set(sides) - {"k", "v"} or not all(part in FORMATS for part in pair):
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(FORMATS)}, or k:FORMAT,v:FORMAT, got {value!r}")
    return pair[0] if pair[0] == pair[1] else f"k:{pair[0]},v:{pair[1]}"


def _find(models: Mapping[str, Mapping], names: Sequence[str]) -> str | None:
    """The section that names a model in full, else the first with a pattern that fits."""
    for fits in (str.__eq__, fnmatch.fnmatchcase):
        for section, content in models.items():
            if any(fits(name, pattern) for pattern in content["names"] for name in names):
                return section
    return None


def _merge(layers: Sequence[Mapping], source: str) -> Limits:
    overall: dict[str, Limit] = {}
    buckets: dict[str, dict[str, Limit]] = {}
    plain: dict = {}
    for layer in layers:
        overall |= layer["overall"]
        for bucket, limits in layer["buckets"].items():
            buckets[bucket] = buckets.get(bucket, {}) | limits
        plain |= {name: layer[name] for name in ("min_tokens", "drift") if layer[name] is not None}
    return Limits(overall, buckets, source=source, **plain)


# -- reading ---------------------------------------------------------------------------------------


def _read(path: Path) -> dict:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not TOML: {error}") from error
    _only(raw, {"default", "models"}, path.name)
    default = _table(raw.get("default", {}), f"{path.name} [default]")
    models = {}
    for name, content in _table(raw.get("models", {}), f"{path.name} [models]").items():
        where = f"{path.name} [models.{name}]"
        content = dict(_table(content, where))
        names = content.pop("names", [name])
        if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
            raise ValueError(f"{where}: names must be a list of strings, got {names!r}")
        dtypes = {
            key: content.pop(key) for key in list(content) if key not in _RANGES | {"buckets": 0, "min_tokens": 0}
        }
        models[name] = _section(content, where) | {
            "names": names,
            "dtypes": {
                _checked_dtype(key, where): _section(_table(values, f"{where} {key}"), f"{where} {key}")
                for key, values in dtypes.items()
            },
        }
    return {"default": _section(default, f"{path.name} [default]") if default else {}, "models": models}


def _checked_dtype(key: str, where: str) -> str:
    try:
        return canonical_dtype(key)
    except ValueError as error:
        raise ValueError(f"{where}: {key!r} is neither a limit nor a dtype: {error}") from error


def _section(content: Mapping, where: str) -> dict:
    _only(content, {*_RANGES, "buckets", "min_tokens"}, where)
    min_tokens = content.get("min_tokens")
    if min_tokens is not None and (isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 1):
        raise ValueError(f"{where}: min_tokens must be an integer >= 1, got {min_tokens!r}")
    buckets = {}
    for bucket, limits in _table(content.get("buckets", {}), f"{where} buckets").items():
        if bucket not in BUCKETS:
            raise ValueError(f"{where}: there is no position bucket {bucket!r}; there are {', '.join(BUCKETS)}")
        _only(_table(limits, f"{where} {bucket}"), set(METRICS), f"{where} {bucket}")
        buckets[bucket] = {metric: _limit(metric, value, f"{where} {bucket}") for metric, value in limits.items()}
    return {
        "overall": {metric: _limit(metric, content[metric], where) for metric in METRICS if metric in content},
        "buckets": buckets,
        "min_tokens": min_tokens,
        "drift": _limit("drift", content["drift"], where) if "drift" in content else None,
    }


def _limit(metric: str, value, where: str) -> Limit:
    low, high = _RANGES[metric]
    _only(_table(value, f"{where} {metric}"), {"warn", "fail"}, f"{where} {metric}")
    for name, bound in value.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not low <= bound <= high:
            raise ValueError(f"{where} {metric}: {name} must be a number in [{low}, {high}], got {bound!r}")
    limit = Limit(**value)
    if limit.warn is not None and limit.fail is not None:
        first, last = (limit.warn, limit.fail) if METRICS.get(metric, True) else (limit.fail, limit.warn)
        if first > last:
            raise ValueError(f"{where} {metric}: warn={limit.warn} lies beyond fail={limit.fail}")
    return limit


def _table(value, where: str) -> Mapping:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, got {value!r}")
    return value


def _only(content: Mapping, known: set[str], where: str) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
