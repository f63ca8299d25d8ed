"""Figures against formulas written out, and standard errors against what repetition shows."""

import math

import numpy as np
import pytest

from hf_paged_eval import Stats, TokenTable, normalise, summarize
from hf_paged_eval.metrics import BUCKETS, block_numbers, standard_error, stats_of


def table(lengths=(300, 70, 1), seed=0, start=0):
    """A table with random columns; probabilities between 0 and 1, one document after the other."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logprob = np.log(rng.uniform(0.01, 0.99, count))
    return TokenTable(
        document=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        index=np.concatenate([np.arange(1, length + 1) for length in lengths]),
        position=np.concatenate([np.arange(1, length + 1) + start for length in lengths]).astype(np.int32),
        logprob=logprob,
        best=rng.uniform(size=count) < 0.4,
        reference_logprob=logprob + rng.normal(0, 0.05, count),
        kl=rng.exponential(0.01, count),
        agrees=rng.uniform(size=count) < 0.9,
    )


def test_figures_are_the_formulas():
    one = table()
    got = stats_of(one)
    n = len(one)
    pairs = list(zip(one.logprob.tolist(), one.reference_logprob.tolist(), strict=True))
    assert got.num_tokens == n == 371
    assert got.perplexity == pytest.approx(math.exp(-sum(mine for mine, _ in pairs) / n), rel=1e-12)
    assert got.reference_perplexity == pytest.approx(math.exp(-sum(other for _, other in pairs) / n), rel=1e-12)
    assert got.log_ratio == pytest.approx(sum(other - mine for mine, other in pairs) / n, rel=1e-9)
    assert got.ratio == pytest.approx(got.perplexity / got.reference_perplexity, rel=1e-12)
    ordered = sorted(one.kl.tolist())

    def quantile(share):  # linear between the two values beside it
        place = share * (n - 1)
        low = int(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, n - 1)] - ordered[low])

    assert got.kl_mean == pytest.approx(sum(ordered) / n, rel=1e-12)
    assert got.kl_median == pytest.approx(quantile(0.5), rel=1e-12)
    assert got.kl_p99 == pytest.approx(quantile(0.99), rel=1e-12)
    assert got.kl_p999 == pytest.approx(quantile(0.999), rel=1e-12)
    assert got.kl_max == ordered[-1]
    assert got.top1 == one.agrees.tolist().count(True) / n
    assert got.accuracy == one.best.tolist().count(True) / n
    squares = [(math.exp(mine) - math.exp(other)) ** 2 for mine, other in pairs]
    assert got.rms_prob == pytest.approx(math.sqrt(sum(squares) / n), rel=1e-12)


def test_standard_error_is_the_formula():
    one = table()
    groups = block_numbers(one, 128)
    # 300 tokens at places 1..300: 127, 128 and 45; then 70; then 1.
    assert [groups.tolist().count(group) for group in range(5)] == [127, 128, 45, 70, 1]
    values = one.kl.tolist()
    mean = sum(values) / len(values)
    sums = [sum(v - mean for v, g in zip(values, groups, strict=True) if g == group) for group in range(5)]
    want = math.sqrt(5 / 4 * sum(total**2 for total in sums)) / len(values)
    assert standard_error(one.kl, groups) == pytest.approx(want, rel=1e-9)
    assert stats_of(one).kl_se == pytest.approx(want, rel=1e-9) and stats_of(one).num_blocks == 5
    # Blocks of one token: the usual error of independent values.
    alone = standard_error(one.kl, np.arange(len(values)))
    assert alone == pytest.approx(one.kl.std(ddof=1) / math.sqrt(len(values)), rel=1e-9)


def test_one_block_has_no_standard_error():
    got = stats_of(table((50,)))
    assert got.log_ratio_se is got.kl_se is got.top1_se is None and got.num_blocks == 1


def test_standard_errors_cover_correlated_tokens():
    """Repeated 400 times: the mean's spread is what the blocks say, and not what independent tokens would give."""
    rng, lengths, rho = np.random.default_rng(1), (2000, 900, 1500, 700, 3000), 0.8
    count = sum(lengths)
    shape = table(lengths)
    groups = block_numbers(shape)
    means, errors, naive, covered = [], [], [], 0
    for _ in range(400):
        shocks = rng.normal(0, math.sqrt(1 - rho**2), count)
        noise, at = np.empty(count), 0
        for length in lengths:
            noise[at] = rng.normal()
            for i in range(at + 1, at + length):
                noise[i] = rho * noise[i - 1] + shocks[i]
            at += length
        values = 0.01 + noise
        means.append(values.mean())
        errors.append(standard_error(values, groups))
        naive.append(values.std(ddof=1) / math.sqrt(count))
        covered += abs(means[-1] - 0.01) < 2 * errors[-1]
    spread = float(np.std(means))
    assert np.mean(errors) == pytest.approx(spread, rel=0.12)
    assert 0.91 <= covered / 400 <= 0.98  # 2 standard errors: 95 %
    assert np.mean(naive) < 0.5 * spread


def test_buckets_go_by_the_context_before_a_token():
    count = 9000
    position = np.arange(1, count + 1, dtype=np.int32)
    zeros = np.zeros(count)
    one = TokenTable(zeros.astype(np.int32), position.astype(np.int64), position, np.log((position % 7 + 1) / 8.0))
    found = summarize(one).buckets
    assert list(found) == ["0-512", "512-1k", "1k-2k", "2k-4k", "4k-8k", "8k+"] == list(BUCKETS)
    assert [found[name].num_tokens for name in found] == [511, 512, 1024, 2048, 4096, 809]
    chosen = [math.log((p % 7 + 1) / 8) for p in range(512, 1024)]
    assert found["512-1k"].perplexity == pytest.approx(math.exp(-sum(chosen) / 512), rel=1e-12)
    assert found["512-1k"].kl_mean is None and found["512-1k"].ratio is None


def test_a_bucket_without_tokens_is_not_measured():
    found = summarize(table((600,)))
    assert isinstance(found.buckets["0-512"], Stats) and isinstance(found.buckets["512-1k"], Stats)
    assert found.buckets["1k-2k"] is None and found.to_dict()["buckets"]["8k+"] is None
    assert found.to_dict()["overall"]["num_tokens"] == 600


def test_what_is_not_a_number_stays_so():
    one = table((200, 200))
    one.logprob[3] = math.nan
    got = stats_of(one)
    assert math.isnan(got.perplexity) and math.isnan(got.log_ratio_se) and got.reference_perplexity > 0
    one.logprob[3] = -math.inf
    assert stats_of(one).perplexity == math.inf


def test_units():
    got = normalise(120.0, 50, 30, 200)
    assert got.token_perplexity == pytest.approx(math.exp(120 / 50))
    assert got.word_perplexity == pytest.approx(math.exp(4))
    assert got.byte_perplexity == pytest.approx(math.exp(0.6))
    assert got.bits_per_byte == pytest.approx(0.6 / math.log(2)) and 2**got.bits_per_byte == pytest.approx(
        got.byte_perplexity
    )
    assert normalise(1.0, 2).word_perplexity is None and normalise(1e6, 2).token_perplexity == math.inf


def test_columns_have_one_length_and_an_empty_table_is_refused():
    with pytest.raises(ValueError, match="column logprob has 2 entries"):
        TokenTable(np.zeros(3, np.int32), np.zeros(3, np.int64), np.zeros(3, np.int32), np.zeros(2))
    with pytest.raises(ValueError, match="no token was scored"):
        summarize(TokenTable.empty(0, True))
    with pytest.raises(ValueError, match="block must be at least 1"):
        block_numbers(table(), 0)
