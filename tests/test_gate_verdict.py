"""Verdicts from figures: what passes, what fails, what stays open and how many tokens would decide it."""

import math

import pytest
from gate_helpers import LIMITS, stats

from hf_paged_eval.gate import EXIT, Outcome, Verdict, check_drift, judge, more_tokens
from hf_paged_eval.gate_limits import BUCKETS, Limit, Limits


def verdict(limits=LIMITS, buckets=None, **changes):
    return judge(stats(**changes), buckets or dict.fromkeys(BUCKETS), limits)


def check_of(found: Verdict, metric: str, scope: str = "all"):
    return next(check for check in found.checks if (check.metric, check.scope) == (metric, scope))


def test_good_figures_pass():
    found = verdict()
    assert found.outcome is Outcome.PASS and found.exit_code == 0
    assert [check.metric for check in found.checks] == ["ratio", "mean_kld", "top1"]
    assert check_of(found, "ratio").high == pytest.approx(1.001 * math.exp(0.001))


@pytest.mark.parametrize(
    ("metric", "changes", "outcome"),
    [
        ("ratio", {"ratio": 1.02, "log_ratio_se": 0.001}, Outcome.FAIL),
        ("ratio", {"ratio": 1.0095, "log_ratio_se": 0.001}, Outcome.INCONCLUSIVE),
        ("ratio", {"ratio": 1.0105, "log_ratio_se": 0.001}, Outcome.INCONCLUSIVE),
        ("ratio", {"ratio": 1.007, "log_ratio_se": 0.0005}, Outcome.WARN),
        ("ratio", {"ratio": 1.0045, "log_ratio_se": 0.0005}, Outcome.WARN),
        ("ratio", {"ratio": 0.97, "log_ratio_se": 0.0005}, Outcome.PASS),
        ("mean_kld", {"kl_mean": 0.03, "kl_se": 0.001}, Outcome.FAIL),
        ("mean_kld", {"kl_mean": 0.03, "kl_se": 0.006}, Outcome.INCONCLUSIVE),
        ("mean_kld", {"kl_mean": 0.015, "kl_se": 0.001}, Outcome.WARN),
        ("top1", {"top1": 0.90, "top1_se": 0.004}, Outcome.FAIL),
        ("top1", {"top1": 0.925, "top1_se": 0.004}, Outcome.INCONCLUSIVE),
        ("top1", {"top1": 0.935, "top1_se": 0.003}, Outcome.WARN),
    ],
)
def test_each_metric_decides_alone(metric, changes, outcome):
    found = verdict(**changes)
    assert check_of(found, metric).outcome is outcome and found.outcome is outcome
    assert found.exit_code == {"pass": 0, "warn": 0, "fail": 1, "inconclusive": 3}[outcome]
    assert all(check.outcome is Outcome.PASS for check in found.checks if check.metric != metric)


def test_a_failure_counts_more_than_an_open_question():
    found = verdict(kl_mean=0.03, kl_se=0.001, ratio=1.0095, log_ratio_se=0.001)
    assert found.outcome is Outcome.FAIL and found.exit_code == 1


def test_tokens_that_are_missing_would_decide():
    found = verdict(kl_mean=0.018, kl_se=0.002)
    check = check_of(found, "mean_kld")
    assert check.outcome is Outcome.INCONCLUSIVE and found.more_tokens == check.more_tokens
    assert f"{check.more_tokens:,} more tokens" in check.message
    # With so many the error has fallen with the square root, and the interval just stays off the limit.
    error = 0.002 * math.sqrt(10_000 / (10_000 + check.more_tokens))
    assert 0.9 * (0.02 - 0.018) < 2 * error <= 0.02 - 0.018


def test_a_value_on_the_limit_cannot_be_decided():
    assert more_tokens("mean_kld", 0.02, 0.001, 0.02, 1000) is None
    assert more_tokens("mean_kld", 0.0199999, 0.001, 0.02, 1000) is None  # billions are no help
    check = check_of(verdict(kl_mean=0.02, kl_se=0.001), "mean_kld")
    assert check.outcome is Outcome.INCONCLUSIVE and "cannot be decided" in check.message
    # But without any spread it is where it is.
    assert check_of(verdict(kl_mean=0.02, kl_se=0.0), "mean_kld").outcome is not Outcome.INCONCLUSIVE


def test_few_tokens_decide_nothing():
    found = verdict(num_tokens=60)
    assert found.outcome is Outcome.INCONCLUSIVE and found.more_tokens == 40
    # Full agreement of few tokens has no spread in the sample, and yet says little.
    small = Limits({"top1": Limit(0.94, 0.92)})
    assert judge(stats(num_tokens=12, top1=1.0, top1_se=0.0), {}, small).outcome is Outcome.INCONCLUSIVE
    assert judge(stats(num_tokens=500, top1=1.0, top1_se=0.0), {}, small).outcome is Outcome.PASS


@pytest.mark.parametrize(
    "changes", [{"ratio": math.nan}, {"kl_mean": math.nan}, {"kl_mean": math.inf}, {"ratio": math.inf}]
)
def test_a_candidate_without_finite_numbers_fails(changes):
    assert verdict(**changes).exit_code == 1


@pytest.mark.parametrize("name", ["log_ratio_se", "kl_se", "top1_se"])
@pytest.mark.parametrize("error", [None, math.nan])
def test_an_unknown_error_decides_nothing(name, error):
    assert verdict(**{name: error}).outcome is Outcome.INCONCLUSIVE


def test_buckets_have_limits_of_their_own():
    limits = Limits({}, {"0-512": {"ratio": Limit(None, 1.01)}, "4k-8k": {"mean_kld": Limit(0.01, 0.02)}}, 100)
    found = verdict(limits, {"0-512": stats(), "4k-8k": stats(kl_mean=0.05)})
    assert [(check.scope, check.outcome.value) for check in found.checks] == [("0-512", "pass"), ("4k-8k", "fail")]
    found = verdict(limits, {"0-512": stats(), "4k-8k": None})
    open_ = check_of(found, "mean_kld", "4k-8k")
    assert found.exit_code == 3 and "not measured" in open_.message and open_.value is None
    found = verdict(limits, {"0-512": stats(), "4k-8k": stats(num_tokens=50)})
    assert found.exit_code == 3 and found.more_tokens == 50


def test_a_gate_that_cannot_fail_is_refused():
    with pytest.raises(ValueError, match="could not fail"):
        verdict(Limits())
    with pytest.raises(ValueError, match="could not fail"):
        verdict(Limits({"ratio": Limit()}))


def test_a_broken_baseline_is_no_verdict():
    with pytest.raises(RuntimeError, match="baseline"):
        verdict(reference_perplexity=math.nan)
    with pytest.raises(RuntimeError, match="no token"):
        verdict(num_tokens=0)


def test_drift():
    limits = Limits({"ratio": Limit(1, 2)}, drift=Limit(2e-4, 1e-3))
    outcomes = [check_drift(20 * (1 + change), 20, 10, limits).outcome for change in (0, 1e-4, -5e-4, 2e-3, -2e-3)]
    assert outcomes == [Outcome.PASS, Outcome.PASS, Outcome.WARN, Outcome.FAIL, Outcome.FAIL]
    assert check_drift(math.nan, 20, 10, limits).outcome is Outcome.FAIL
    assert verdict().with_checks([check_drift(21, 20, 10, limits)]).exit_code == EXIT[Outcome.FAIL]
