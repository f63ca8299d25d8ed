"""One run of the quality gate: baseline and candidate in lockstep, compared, judged, recorded.

Contract: `run_gate` measures and judges; it prints and writes nothing but a stored baseline where it is asked to.
`GateResult.record` is plain data (JSON) that holds all that a report shows.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import hf_paged

from . import baselines as stored
from .gate import Check, Verdict, check_drift, judge
from .gate_limits import Limits, canonical_dtype, limits_for
from .identity import ModelIdentity, model_identity
from .metrics import normalise, stats_of, summarize
from .quant_error import CacheMeasure, measure_cache
from .scoring import score

RECORD = 1  # version of the record's layout
FEWEST = 20  # tokens behind a point of a plot


@dataclass(frozen=True)
class Text:
    """What is scored.

    Attributes:
        documents: token ids.
        name, digest: of the corpus.
        num_bytes: of the scored text in UTF-8, for bits per byte; None where it is not known.
        about: what else a report says of it (BOS policy, how documents are cut); plain values.
        settings: what changes a perplexity apart from the tokens; a stored baseline belongs to it.
        bos_token_id: a token that stands before every window.
    """

    documents: Sequence[Sequence[int]]
    name: str = "documents"
    digest: str = ""
    num_bytes: int | None = None
    about: Mapping[str, object] | None = None
    settings: Mapping[str, object] | None = None
    bos_token_id: int | None = None

    def content_hash(self) -> str:
        """Over the corpus' own hash and the token ids: another tokenizer is another corpus."""
        digest = hashlib.sha256(self.digest.encode())
        for document in self.documents:
            digest.update(np.asarray(list(document), dtype="<i8").tobytes() + b"/")
        return f"sha256:{digest.hexdigest()}"


@dataclass(frozen=True)
class GateResult:
    """
    Attributes:
        verdict: what the comparison came to.
        record: all of it as plain data.
    """

    verdict: Verdict
    record: dict


def run_gate(
    model: Any,
    text: Text | Sequence[Sequence[int]],
    cache_config: Mapping | hf_paged.PagedCacheConfig,
    *,
    name: str | None = None,
    limits: Limits | None = None,
    config: str | Path | None = None,
    max_length: int | None = None,
    stride: int | None = None,
    chunk_size: int = 64,
    batch_size: int = 8,
    baselines: str | Path | None = None,
    update_baseline: bool = False,
    progress_bar: bool = False,
    identity: ModelIdentity | None = None,
) -> GateResult:
    """Compare a cache format with the model's own dtype and judge it.

    Args:
        model: a causal LM of transformers.
        text: documents of token ids, or a Text.
        cache_config: the candidate.
        name: what the model was asked for by; `gates.toml` may name it so.
        limits: what to hold it to; None for those of `config`, or the package's.
        config: the user's own gates.toml.
        max_length, stride, chunk_size, batch_size: as `scoring.score` takes them.
        baselines: a file with one stored baseline, which must fit, or a folder of them; None for the package's own.
        update_baseline: store the baseline's perplexity in the folder `baselines`.
        progress_bar: on stderr, with the time left.
        identity: of the model, where it is known already.
    Raises:
        ValueError: an argument is wrong, or a stored baseline that should fit is stale or foreign.
        RuntimeError: it cannot be measured.
    """
    text = text if isinstance(text, Text) else Text(list(text))
    candidate = hf_paged.PagedCacheConfig.from_any(cache_config)
    identity = identity or model_identity(model, name)
    if limits is None:
        limits = limits_for(identity.names(name), candidate.kv_cache_dtype, config)
    settings = {"max_length": max_length, "stride": stride, "bos_token_id": text.bos_token_id, **(text.settings or {})}
    key = stored.BaselineKey(identity.name, identity.weights, text.name, text.content_hash(), settings)
    known, notes = _stored_baseline(key, baselines, update_baseline)  # refused before minutes of scoring, not after

    measure = _measure(model, text, candidate, notes)
    reference = {"block_size": candidate.block_size, "memory_fraction": candidate.memory_fraction}
    result = score(
        model,
        text.documents,
        cache_config=candidate,
        max_length=max_length,
        stride=stride,
        chunk_size=chunk_size,
        batch_size=batch_size,
        reference=reference,
        progress_bar=progress_bar,
        bos_token_id=text.bos_token_id,
    )
    table, summary = result.tokens, summarize(result.tokens)
    verdict = judge(summary.overall, summary.buckets, limits)
    nll, live = result.reference_nll_sum, result.reference_perplexity
    about_baseline: dict = {"perplexity": live, "stored": None, "file": None}
    units = {
        side: normalise(total, result.num_tokens, num_bytes=text.num_bytes).bits_per_byte
        for side, total in (("candidate", result.nll_sum), ("baseline", nll))
    }
    if update_baseline:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        file = stored.store(baselines, stored.Baseline(key, live, nll, result.num_tokens, versions(), now))
        notes.append(f"stored the baseline's perplexity: {file.name}")
        about_baseline["file"] = file.name
    elif known is not None:
        about_baseline |= {"stored": known.perplexity, "file": known.key.file_name()}
        verdict = verdict.with_checks([_drift(known, live, result.num_tokens, limits)])
    record = {
        "record": RECORD,
        "kind": "gate",
        "outcome": verdict.outcome.value,
        "exit_code": verdict.exit_code,
        "more_tokens": verdict.more_tokens,
        "model": identity.to_dict(),
        "candidate": plain(candidate.to_dict()),
        "corpus": {
            "name": text.name,
            "hash": text.content_hash(),
            "documents": len(text.documents),
            "longest_document": max(map(len, text.documents), default=0),
            **(text.about or {}),
        },
        "settings": {**settings, "chunk_size": chunk_size, "batch_size": batch_size},
        "num_tokens": result.num_tokens,
        "bits_per_byte": units,
        "limits": limits.to_dict(),
        "checks": [check.to_dict() for check in verdict.checks],
        "summary": plain(summary.to_dict()),
        "baseline": about_baseline,
        "by_position": by_position(table),
        "kl_histogram": kl_histogram(table.kl),
        "cache": None if measure is None else measure.to_dict(),
        "seconds": result.seconds,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "notes": notes,
    }
    return GateResult(verdict, plain(record))


def dtype_of(cache_config: Mapping | hf_paged.PagedCacheConfig) -> str:
    """The kv_cache_dtype of a config in its one spelling."""
    return canonical_dtype(hf_paged.PagedCacheConfig.from_any(cache_config).kv_cache_dtype)


def versions() -> dict[str, str]:
    """What computed a number."""
    return {
        "hf_paged": hf_paged.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _stored_baseline(
    key: stored.BaselineKey, place: str | Path | None, update: bool
) -> tuple[stored.Baseline | None, list[str]]:
    """The record to compare with, and what to say about those that there are."""
    if update:
        if place is None or Path(place).is_file():
            raise ValueError(f"to update a baseline, baselines must be a folder to store it in, got {place}")
        return None, []
    if place is not None and not Path(place).is_dir():
        if not Path(place).is_file():
            raise ValueError(f"baselines: there is no file or folder {place}")
        return stored.refuse_unless_fitting(place, key), []
    found, refused = stored.find(stored.BUILT_IN if place is None else place, key)
    if found is not None:
        return found, []
    if refused and place is not None:
        raise ValueError("; ".join(refused) + ". update_baseline (--update-baseline) writes a new one")
    return None, [*refused, "no stored baseline of this model, text and settings: its own perplexity is not guarded"]


def _drift(known: stored.Baseline, live: float, num_tokens: int, limits: Limits) -> Check:
    if known.num_tokens != num_tokens:
        raise RuntimeError(f"{num_tokens:,} tokens were scored, the stored baseline has {known.num_tokens:,}")
    return check_drift(live, known.perplexity, num_tokens, limits)


def _measure(model: Any, text: Text, candidate: hf_paged.PagedCacheConfig, notes: list[str]) -> CacheMeasure | None:
    """Errors by layer; they explain a verdict and are no part of it, so a model that hides its keys may go without."""
    try:
        return measure_cache(model, text.documents, candidate)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        notes.append(f"errors by layer could not be measured: {error}")
        return None


# -- what plots show -------------------------------------------------------------------------------


def by_position(table: Any) -> list[dict]:
    """Perplexities and mean KL over positions, in ranges that double, with standard errors."""
    rows, low, high = [], 0, 16
    position = np.asarray(table.position)
    while low <= (position.max() if position.size else -1):
        inside = (position >= low) & (position < high)
        if inside.sum() >= FEWEST:
            stats = stats_of(table.select(inside))
            names = ("num_tokens", "perplexity", "reference_perplexity", "ratio", "log_ratio_se", "kl_mean", "kl_se")
            rows.append({"low": low, "high": high, **{name: getattr(stats, name) for name in names}})
        low, high = high, 2 * high
    return plain(rows)


def kl_histogram(kl: np.ndarray) -> list[dict]:
    """Share of tokens by KL divergence, three ranges a decade from 1e-6 nats on; the first and last are open."""
    kl = np.asarray(kl, dtype=np.float64)
    edges = [0.0, *(10.0 ** (step / 3) for step in range(-18, 4)), math.inf]
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (kl < high) & ((kl >= low) if low else np.ones_like(kl, dtype=bool))  # rounding may go below zero
        rows.append({"low": low, "high": high if math.isfinite(high) else None, "share": float(inside.mean())})
    return rows


def plain(value: Any) -> Any:
    """Data that JSON can hold: no numpy, no tuples, and None for what is not a finite number."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
