"""How a gate's figures are put into words, the same in every report.

Contract: plain text from a gate's record; what is shown is rounded, what is judged never is.
"""

from __future__ import annotations

from collections.abc import Mapping

WORDS = {
    "pass": "passed",
    "warn": "passed with warnings",
    "fail": "failed: a regression",
    "inconclusive": "inconclusive",
    "error": "could not run",
}
METRIC_NAMES = {
    "ratio": "perplexity ratio",
    "mean_kld": "mean KLD (nats)",
    "top1": "top-1 agreement",
    "drift": "baseline drift",
}


def headline(record: Mapping) -> str:
    """One line: what was compared, and what it came to."""
    text = f"{record['model']['name']}, {candidate_name(record['candidate'])}: {WORDS[record['outcome']]}"
    if record["outcome"] == "inconclusive" and record.get("more_tokens"):
        text += f", needs about {record['more_tokens']:,} more tokens"
    return text


def candidate_name(candidate: Mapping) -> str:
    """A cache format in short: dtype, granularity, layers left out, keys that are not rotated."""
    name = spelled(candidate.get("kv_cache_dtype", "auto"))
    granularity = candidate.get("kv_scale_granularity")
    if granularity and name != "auto":
        name += f" {spelled(granularity)}"
    skipped = candidate.get("skip_layers")
    if skipped:
        layers = (str(one) if isinstance(one, int) else f"{one[0]} ({one[1]})" for one in skipped)
        name += f", without layers {', '.join(layers)}"
    if candidate.get("rotate_keys") is False:
        name += ", keys not rotated"
    return name


def spelled(value: str | Mapping) -> str:
    """A setting of keys and values as one word."""
    return value if isinstance(value, str) else ",".join(f"{side}:{word}" for side, word in value.items())


def shown(metric: str, value: float | None) -> str:
    """A metric's value as tables show it."""
    if value is None:
        return "-"
    if metric == "top1":
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if metric == "ratio" else f"{value:.2g}" if metric == "drift" else f"{value:.5f}"


def interval(check: Mapping) -> str:
    """A check's value two standard errors either way."""
    if check["low"] is None:
        return "-"
    return f"{shown(check['metric'], check['low'])} to {shown(check['metric'], check['high'])}"


def scope_name(scope: str) -> str:
    return "all positions" if scope == "all" else f"positions {scope}"
