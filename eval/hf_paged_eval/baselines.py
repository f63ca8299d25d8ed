"""Stored perplexities of unquantised models, which guard against drift of that number itself.

Contract: the gate's verdict compares a live baseline with a live candidate, so a fault that hits both would not show;
a stored number shows it. One belongs to a model's weights, a corpus and the settings of the scoring, all three by
content. A record that does not fit is never compared with: it is refused, and why is said. One JSON file a record.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import write_text

BUILT_IN = Path(__file__).with_name("baselines")
# Raise whenever the same weights, corpus and settings would rightly give another number: older records are stale.
FORMAT = 1


@dataclass(frozen=True)
class BaselineKey:
    """What a stored number belongs to.

    Attributes:
        model: the model's name, for people.
        weights: its identity (`ModelIdentity.weights`).
        corpus: the corpus' name, for people.
        corpus_hash: hash of its text and tokens.
        settings: of the scoring, as far as they change the number (windows, BOS policy); plain values.
    """

    model: str
    weights: str
    corpus: str
    corpus_hash: str
    settings: Mapping[str, object]

    def settings_hash(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()

    def file_name(self) -> str:
        """Readable, and another one for every key."""
        whole = "\n".join((self.weights, self.corpus_hash, self.settings_hash()))
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.model}-{self.corpus}").strip("-.")
        return f"{slug}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}.json"


@dataclass(frozen=True)
class Baseline:
    """A stored number.

    Attributes:
        key: what it belongs to.
        perplexity, nll_sum, num_tokens: of the unquantised model.
        versions: of the packages that computed it.
        date: when, ISO 8601.
    """

    key: BaselineKey
    perplexity: float
    nll_sum: float
    num_tokens: int
    versions: Mapping[str, str]
    date: str


def find(folder: str | Path, key: BaselineKey) -> tuple[Baseline | None, list[str]]:
    """The record of a key, and what was refused.

    Returns:
        The record or None; and for each that goes by the same names and settings and yet does not fit, why.
    Raises:
        ValueError: a file is not such a record.
    """
    found, refused = None, []
    for file in sorted(Path(folder).glob("*.json")):
        baseline = load(file)
        reasons, theirs = differences(baseline, key), baseline.key
        if not reasons:
            found = baseline
        elif (theirs.model, theirs.corpus) == (key.model, key.corpus) and (
            isinstance(baseline, _Stale) or theirs.settings_hash() == key.settings_hash()
        ):
            refused.append(f"{file.name} is refused: {'; '.join(reasons)}")
    return found, refused


def load(path: str | Path) -> Baseline:
    """Read one record.

    Raises:
        ValueError: the file is not one.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = Baseline if raw["format"] == FORMAT else _Stale
        key = BaselineKey(**raw["key"])
        baseline = kind(key, *(raw[name] for name in ("perplexity", "nll_sum", "num_tokens", "versions", "date")))
        whole = math.isfinite(baseline.perplexity) and baseline.perplexity > 0 and baseline.num_tokens > 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a stored baseline: {type(error).__name__}: {error}") from error
    if not whole or not math.isclose(
        math.exp(baseline.nll_sum / baseline.num_tokens), baseline.perplexity, rel_tol=1e-9
    ):
        raise ValueError(f"{path.name} contradicts itself: its perplexity is not that of its tokens")
    return baseline


def differences(baseline: Baseline, key: BaselineKey) -> list[str]:
    """Why a record is not that of a key: stale (an older format, another text under the name), or foreign."""
    reasons = []
    if isinstance(baseline, _Stale):
        reasons.append(f"stale: not of format {FORMAT}, which this version writes")
    if baseline.key.weights != key.weights:
        reasons.append(f"foreign: of other weights ({_short(baseline.key.weights)}, not {_short(key.weights)})")
    if baseline.key.corpus_hash != key.corpus_hash:
        word = "stale" if baseline.key.corpus == key.corpus else "foreign"
        reasons.append(f"{word}: of another text ({_short(baseline.key.corpus_hash)}, not {_short(key.corpus_hash)})")
    if baseline.key.settings_hash() != key.settings_hash():
        names = sorted({*baseline.key.settings, *key.settings})
        pairs = [(name, baseline.key.settings.get(name), key.settings.get(name)) for name in names]
        changed = ", ".join(f"{name} {theirs!r}, not {ours!r}" for name, theirs, ours in pairs if theirs != ours)
        reasons.append(f"foreign: of other settings ({changed})")
    return reasons


def refuse_unless_fitting(path: str | Path, key: BaselineKey) -> Baseline:
    """The record in a file that somebody named.

    Raises:
        ValueError: it is stale or foreign, and why.
    """
    baseline = load(path)
    reasons = differences(baseline, key)
    if reasons:
        raise ValueError(f"{Path(path).name} is refused: {'; '.join(reasons)}. --update-baseline writes a new one")
    return baseline


def store(folder: str | Path, baseline: Baseline) -> Path:
    """Write a record; one of the same key is replaced.

    Raises:
        ValueError: its perplexity is no finite number.
    """
    if not math.isfinite(baseline.perplexity):
        raise ValueError(f"a perplexity of {baseline.perplexity} is no baseline")
    key = asdict(baseline.key) | {"settings": dict(baseline.key.settings)}
    record = {"format": FORMAT, "key": key, "perplexity": baseline.perplexity, "nll_sum": baseline.nll_sum}
    record |= {"num_tokens": baseline.num_tokens, "versions": dict(baseline.versions), "date": baseline.date}
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    return write_text(Path(folder) / baseline.key.file_name(), text)


class _Stale(Baseline):
    """A record of another format."""


def _short(digest: str) -> str:
    kind, _, hexadecimal = digest.rpartition(":")
    return f"{kind}:{hexadecimal[:8]}" if kind else hexadecimal[:8]
