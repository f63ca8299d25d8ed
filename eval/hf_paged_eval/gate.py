"""The verdict of the quality gate: measured differences, with their standard errors, against limits.

Contract: plain numbers in, a `Verdict` out; nothing is measured here. A metric stays within a limit when its mean plus
two standard errors does, is beyond it when its mean minus two is, and otherwise nothing is decided. The exit status of
a verdict: 0 pass or warn, 1 regression, 3 inconclusive (2 is for gates that could not run).

Standard errors are those of the paired differences (`metrics.summarize`). Agreement near 100 % has hardly any spread in
the sample, so its error is at least that of Agresti and Coull (1998): the share with two agreeing and two
disagreeing tokens added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from .gate_limits import BUCKETS, METRICS, Limit, Limits

ERRORS = 2.0  # standard errors that a decision needs
OVERALL = "all"
MOST_TOKENS = 10_000_000  # beyond this "how many more" is no help


class Outcome(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


EXIT = {Outcome.PASS: 0, Outcome.WARN: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}
COULD_NOT_RUN = 2
_ORDER = (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.WARN, Outcome.PASS)


@dataclass(frozen=True)
class Check:
    """One metric in one scope against its limit.

    Attributes:
        scope: "all" or a position bucket.
        metric: "ratio", "mean_kld", "top1" or "drift".
        value, standard_error: of the metric (of the ratio: of its logarithm); None where it was not measured.
        low, high: the value two standard errors either way.
        warn, fail: the limit.
        num_tokens: scored tokens behind the value.
        outcome: what it comes to.
        more_tokens: about how many more tokens would decide it, where it is inconclusive and that can be said.
        message: the same in words.
    """

    scope: str
    metric: str
    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    warn: float | None
    fail: float | None
    num_tokens: int
    outcome: Outcome
    more_tokens: int | None = None
    message: str = ""

    def to_dict(self) -> dict:
        return asdict(self) | {"outcome": self.outcome.value}


@dataclass(frozen=True)
class Verdict:
    """All checks, and what they come to: one failure fails, then one open question leaves it open."""

    checks: tuple[Check, ...]

    @property
    def outcome(self) -> Outcome:
        found = {check.outcome for check in self.checks}
        return next((outcome for outcome in _ORDER if outcome in found), Outcome.PASS)

    @property
    def exit_code(self) -> int:
        return EXIT[self.outcome]

    @property
    def more_tokens(self) -> int | None:
        """About how many more tokens would decide what is open, or None where that cannot be said."""
        wanted = [check.more_tokens for check in self.checks if check.outcome is Outcome.INCONCLUSIVE]
        return max(wanted) if wanted and None not in wanted else None

    def with_checks(self, checks: Sequence[Check]) -> Verdict:
        return Verdict((*self.checks, *checks))


def judge(overall: Any, buckets: Mapping[str, Any], limits: Limits) -> Verdict:
    """Hold measured figures against limits.

    Args:
        overall: of all scored tokens, with the attributes of `metrics.Stats`.
        buckets: position bucket -> the same, or None where no token was scored.
        limits: which metrics count, and how far they may go.
    Raises:
        ValueError: there is no limit at all: such a gate could not fail.
        RuntimeError: the baseline itself has no finite perplexity.
    """
    if not any(limit != Limit() for limit in (*limits.overall.values(), *_all_of(limits.buckets))):
        raise ValueError(f"{limits.source or 'the limits'}: no limit is set, such a gate could not fail")
    if overall is None or not overall.num_tokens:
        raise RuntimeError("no token was scored: the corpus is empty, or no document has two tokens")
    if not math.isfinite(overall.reference_perplexity):
        raise RuntimeError(
            f"the baseline's perplexity is {overall.reference_perplexity}: the model itself gives no finite numbers"
        )
    checks = [_check(OVERALL, metric, overall, limit, limits) for metric, limit in limits.overall.items()]
    for bucket in BUCKETS:
        for metric, limit in limits.buckets.get(bucket, {}).items():
            checks.append(_check(bucket, metric, buckets.get(bucket), limit, limits))
    return Verdict(tuple(check for check in checks if check is not None))


def check_drift(live: float, stored: float, num_tokens: int, limits: Limits) -> Check:
    """The unquantised perplexity against a stored one: the same tokens and weights, so no sampling error."""
    change = abs(live / stored - 1)
    limit, outcome = limits.drift, Outcome.PASS
    if not change <= (math.inf if limit.fail is None else limit.fail):  # NaN fails, too
        outcome = Outcome.FAIL
    elif limit.warn is not None and change > limit.warn:
        outcome = Outcome.WARN
    message = f"the baseline's perplexity is {live:.6g}, stored is {stored:.6g}"
    return Check(
        OVERALL, "drift", change, 0.0, change, change, limit.warn, limit.fail, num_tokens, outcome, None, message
    )


def _all_of(buckets: Mapping[str, Mapping[str, Limit]]) -> list[Limit]:
    return [limit for limits in buckets.values() for limit in limits.values()]


def _check(scope: str, metric: str, stats: Any, limit: Limit, limits: Limits) -> Check | None:
    if limit == Limit():
        return None
    open_ = Outcome.INCONCLUSIVE
    if stats is None or not stats.num_tokens:
        needed = f"needs {limits.min_tokens:,} tokens at positions {scope}"
        return Check(
            scope, metric, None, None, None, None, limit.warn, limit.fail, 0, open_, None, f"not measured: {needed}"
        )
    value, error = _measured(metric, stats)
    low, high = _interval(metric, value, error)
    shown = (scope, metric, value, error, low, high, limit.warn, limit.fail, stats.num_tokens)
    if not math.isfinite(value):
        return Check(*shown, Outcome.FAIL, None, f"{metric} is {value}: the candidate gives no finite numbers")
    if limits.min_tokens and stats.num_tokens < limits.min_tokens:
        more = limits.min_tokens - stats.num_tokens
        return Check(*shown, open_, more, f"{stats.num_tokens:,} tokens, min_tokens is {limits.min_tokens:,}")
    if not math.isfinite(error):
        return Check(*shown, open_, None, "its standard error cannot be told from so few stretches of text")
    sides = {name: _side(metric, low, high, bound) for name, bound in (("warn", limit.warn), ("fail", limit.fail))}
    if sides["fail"] == "beyond":
        return Check(*shown, Outcome.FAIL, None, f"beyond the fail limit {limit.fail:g}")
    if sides["fail"] == "open":
        more = more_tokens(metric, value, error, limit.fail, stats.num_tokens)
        needs = "cannot be decided at this limit" if more is None else f"needs about {more:,} more tokens"
        return Check(*shown, open_, more, f"within two standard errors of the fail limit {limit.fail:g}: {needs}")
    if sides["warn"] == "beyond":
        return Check(*shown, Outcome.WARN, None, f"beyond the warn limit {limit.warn:g}")
    if sides["warn"] == "open":
        return Check(*shown, Outcome.WARN, None, f"within two standard errors of the warn limit {limit.warn:g}")
    return Check(*shown, Outcome.PASS, None, "")


def _measured(metric: str, stats: Any) -> tuple[float, float]:
    """Value and standard error (of a ratio: of its logarithm)."""
    if metric == "ratio":
        return float(stats.ratio), _number(stats.log_ratio_se)
    if metric == "mean_kld":
        return float(stats.kl_mean), _number(stats.kl_se)
    share, count = float(stats.top1), stats.num_tokens
    smoothed = (share * count + 2) / (count + 4)
    least = math.sqrt(max(0.0, smoothed * (1 - smoothed)) / (count + 4))
    error = _number(stats.top1_se)
    return share, max(error, least) if math.isfinite(error) else error


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _interval(metric: str, value: float, error: float) -> tuple[float, float]:
    if metric == "ratio":
        if not math.isfinite(value) or value <= 0:
            return value, value
        return value * math.exp(-ERRORS * error), value * math.exp(ERRORS * error)
    low, high = value - ERRORS * error, value + ERRORS * error
    return (max(0.0, low), min(1.0, high)) if metric == "top1" else (low, high)


def _side(metric: str, low: float, high: float, bound: float | None) -> str:
    """Where an interval lies: "within" a limit, "beyond" it, or neither ("open")."""
    if bound is None:
        return "within"
    if METRICS[metric]:
        return "within" if high < bound or high == bound == low else "beyond" if low > bound else "open"
    return "within" if low > bound or high == bound == low else "beyond" if high < bound else "open"


def more_tokens(metric: str, value: float, error: float, bound: float, num_tokens: int) -> int | None:
    """About how many more tokens make two standard errors smaller than the distance to a limit.

    The error falls with the square root of the tokens; the answer has two significant digits. None where it would be
    more than ten million: then the value lies too close to the limit.
    """
    distance = abs(math.log(value / bound)) if metric == "ratio" else abs(value - bound)
    if not distance:
        return None
    more = num_tokens * ((ERRORS * error / distance) ** 2 - 1)
    if not more <= MOST_TOKENS:
        return None
    more = max(1, math.ceil(more))
    unit = 10 ** max(0, len(str(more)) - 2)
    return -(-more // unit) * unit
