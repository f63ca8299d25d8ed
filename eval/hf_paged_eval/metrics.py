"""Figures from the table of scored tokens: perplexity, divergences, their standard errors, by position.

Contract: `summarize` takes a TokenTable and gives numbers; nothing is measured here. Means of what is compared are over
tokens, each token with its own partner: the same tokens, the same windows, so that most of what makes one text harder
than another cancels.

Standard errors. Neighbouring tokens resemble each other, so a token is no independent observation. Each document is
cut into blocks of `BLOCK` tokens that follow each other, and the blocks are the independent observations (the
cluster-robust error of a mean; blocks that do not overlap, Carlstein 1986): with residuals r_i = x_i - mean,
se = sqrt(G / (G - 1) * sum over blocks of (sum of r_i in the block)^2) / n. Two blocks are the least; with fewer the
error is None. What lasts longer than a block is not in it: text of other kinds than the corpus may differ by more.
No torch in this file.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from .token_table import TokenTable

BLOCK = 128
BUCKETS = {
    "0-512": (0, 512),
    "512-1k": (512, 1024),
    "1k-2k": (1024, 2048),
    "2k-4k": (2048, 4096),
    "4k-8k": (4096, 8192),
    "8k+": (8192, None),
}


@dataclass(frozen=True)
class Stats:
    """Figures of some tokens. Everything behind `perplexity_se` is None without a reference.

    Attributes:
        num_tokens: scored tokens.
        num_blocks: blocks of neighbouring tokens, what the standard errors count.
        perplexity: exp of the mean negative log-probability.
        log_perplexity_se: standard error of its logarithm; of use for the text, not for a comparison.
        accuracy: share of tokens that the model found most likely.
        reference_perplexity: the reference's.
        log_ratio: mean of nll - reference nll, nats a token.
        log_ratio_se: its standard error, from the paired differences.
        ratio: exp(log_ratio): perplexity / reference_perplexity.
        kl_mean, kl_se, kl_median, kl_p99, kl_p999, kl_max: KL(reference || candidate), nats: mean with its standard
            error, 50 %, 99 % and 99.9 % quantile (linear between two values), largest.
        top1, top1_se: share of positions where both find the same token most likely, with its standard error.
        rms_prob: root mean square change of the right token's probability.
    """

    num_tokens: int
    num_blocks: int
    perplexity: float
    log_perplexity_se: float | None
    accuracy: float | None = None
    reference_perplexity: float | None = None
    log_ratio: float | None = None
    log_ratio_se: float | None = None
    ratio: float | None = None
    kl_mean: float | None = None
    kl_se: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    top1_se: float | None = None
    rms_prob: float | None = None

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Summary:
    """Figures of all tokens and of each position bucket; a bucket is None where no token was scored ("not measured").

    Buckets go by the tokens of context before a token in its window: "0-512" has 0 to 511 of them.
    """

    overall: Stats
    buckets: dict[str, Stats | None]

    def to_dict(self) -> dict:
        buckets = {name: None if stats is None else stats.to_dict() for name, stats in self.buckets.items()}
        return {"overall": self.overall.to_dict(), "buckets": buckets}


def summarize(table: TokenTable, block: int = BLOCK) -> Summary:
    """The figures of a table of scored tokens.

    Args:
        table: as `ScoreResult.tokens` has it.
        block: tokens of a block of the standard errors.
    Raises:
        ValueError: the table is empty.
    """
    if not len(table):
        raise ValueError("no token was scored, there is nothing to summarize")
    buckets: dict[str, Stats | None] = {}
    for name, (low, high) in BUCKETS.items():
        chosen = table.position >= low
        if high is not None:
            chosen &= table.position < high
        buckets[name] = stats_of(table.select(chosen), block) if chosen.any() else None
    return Summary(stats_of(table, block), buckets)


def stats_of(table: TokenTable, block: int = BLOCK) -> Stats:
    """The figures of a table that is not empty."""
    groups = block_numbers(table, block)
    nll = -table.logprob
    found = {
        "num_tokens": len(table),
        "num_blocks": int(groups[-1]) + 1,
        "perplexity": _exp(float(nll.mean())),
        "log_perplexity_se": standard_error(nll, groups),
        "accuracy": None if table.best is None else float(table.best.mean()),
    }
    if table.has_reference:
        reference = -table.reference_logprob
        difference = nll - reference
        agrees = table.agrees.astype(np.float64)
        median, p99, p999 = (float(value) for value in np.quantile(table.kl, (0.5, 0.99, 0.999)))
        change = np.exp(table.logprob) - np.exp(table.reference_logprob)
        found |= {
            "reference_perplexity": _exp(float(reference.mean())),
            "log_ratio": float(difference.mean()),
            "log_ratio_se": standard_error(difference, groups),
            "ratio": _exp(float(difference.mean())),
            "kl_mean": float(table.kl.mean()),
            "kl_se": standard_error(table.kl, groups),
            "kl_median": median,
            "kl_p99": p99,
            "kl_p999": p999,
            "kl_max": float(table.kl.max()),
            "top1": float(agrees.mean()),
            "top1_se": standard_error(agrees, groups),
            "rms_prob": float(np.sqrt(np.mean(change**2))),
        }
    return Stats(**found)


def block_numbers(table: TokenTable, block: int = BLOCK) -> np.ndarray:
    """Which block each token belongs to, rising from 0; a block is `block` places of one document that follow."""
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    # By the place in the document, so that a bucket's tokens are grouped as those of the whole are.
    place = table.index // block
    new = np.ones(len(table), dtype=bool)
    new[1:] = (table.document[1:] != table.document[:-1]) | (place[1:] != place[:-1])
    return np.cumsum(new) - 1


def standard_error(values: np.ndarray, groups: np.ndarray) -> float | None:
    """Cluster-robust standard error of the mean of `values`; None with fewer than two groups.

    Args:
        values: `[n]`.
        groups: `[n]`, the number of each value's group, from 0.
    """
    count = int(groups.max()) + 1
    if count < 2:
        return None
    with np.errstate(invalid="ignore"):  # infinities give NaN, which says it
        sums = np.bincount(groups, weights=values - values.mean(), minlength=count)
    return float(np.sqrt(count / (count - 1) * np.sum(sums**2)) / len(values))


@dataclass(frozen=True)
class Normalised:
    """One sum of negative log-probabilities over four kinds of units. Only the last compares between tokenizers.

    Attributes:
        token_perplexity: exp(nll / tokens).
        word_perplexity: exp(nll / words), words being what whitespace separates; None where that is not known.
        byte_perplexity: exp(nll / bytes) of the text in UTF-8.
        bits_per_byte: nll / (bytes * ln 2).
    """

    token_perplexity: float
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None


def normalise(
    nll_sum: float, num_tokens: int, num_words: int | None = None, num_bytes: int | None = None
) -> Normalised:
    """Perplexity by token, word and byte; the counts are those of the text that was scored."""
    return Normalised(
        _exp(nll_sum / num_tokens),
        _exp(nll_sum / num_words) if num_words else None,
        _exp(nll_sum / num_bytes) if num_bytes else None,
        nll_sum / num_bytes / math.log(2) if num_bytes else None,
    )


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
