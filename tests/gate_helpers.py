"""Figures for gate tests that need no model.

Contract: `stats` has the attributes of `metrics.Stats` that a gate reads; `record` is a whole record of a gate, made of
synthetic tokens by the functions that a real run uses.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hf_paged_eval.gate import judge
from hf_paged_eval.gate_limits import Limit, Limits
from hf_paged_eval.gate_run import by_position, kl_histogram, plain, versions
from hf_paged_eval.metrics import summarize
from hf_paged_eval.token_table import TokenTable

LIMITS = Limits(
    {"ratio": Limit(1.005, 1.01), "mean_kld": Limit(0.01, 0.02), "top1": Limit(0.94, 0.92)},
    min_tokens=100,
    source="test",
)


def stats(**changes):
    """Good figures, but for the changes."""
    values = {
        "num_tokens": 10_000,
        "perplexity": 20.02,
        "reference_perplexity": 20.0,
        "ratio": 1.001,
        "log_ratio": float(np.log(changes.get("ratio", 1.001))),
        "log_ratio_se": 0.0005,
        "kl_mean": 0.004,
        "kl_se": 0.0003,
        "top1": 0.97,
        "top1_se": 0.002,
    }
    return SimpleNamespace(**{**values, **changes})


def table(num_documents: int = 6, length: int = 900, harm: float = 0.05, seed: int = 0):
    """Synthetic tokens: the candidate's log-probabilities differ from the baseline's by `harm` and noise."""
    draw = np.random.default_rng(seed)
    count = num_documents * length
    index = np.tile(np.arange(1, length + 1, dtype=np.int64), num_documents)
    reference = -draw.gamma(2.0, 1.2, count)
    noise = draw.normal(0, 0.1, count)
    return TokenTable(
        document=np.repeat(np.arange(num_documents, dtype=np.int32), length),
        index=index,
        position=index.astype(np.int32),
        logprob=reference - harm * 0.05 + noise * harm,
        reference_logprob=reference,
        kl=harm * draw.gamma(0.3, 0.3, count),
        agrees=draw.random(count) > harm * 0.5,
    )


def record(limits: Limits = LIMITS, notes=(), **options) -> dict:
    tokens = table(**options)
    summary = summarize(tokens)
    verdict = judge(summary.overall, summary.buckets, limits)
    layers = [
        {"layer": i, "key": 0.02 + 0.002 * (i % 5), "value": 0.025, "key_max": 0.03, "value_max": 0.03}
        for i in range(30)
    ]
    return plain(
        {
            "record": 1,
            "kind": "gate",
            "outcome": verdict.outcome.value,
            "exit_code": verdict.exit_code,
            "more_tokens": verdict.more_tokens,
            "model": {"name": "example/model-1B", "architecture": "LlamaForCausalLM", "weights": "sha256:" + "ab" * 32},
            "candidate": {"kv_cache_dtype": "fp8_e4m3", "kv_scale_granularity": "per_token_head", "block_size": 16},
            "corpus": {"name": "text <of> & tests", "hash": "sha256:" + "cd" * 32, "documents": 6},
            "settings": {"max_length": None, "stride": None, "chunk_size": 64, "batch_size": 8},
            "num_tokens": len(tokens.logprob),
            "limits": limits.to_dict(),
            "checks": [check.to_dict() for check in verdict.checks],
            "summary": summary.to_dict(),
            "baseline": {"perplexity": 11.0, "stored": None, "file": None},
            "by_position": by_position(tokens),
            "kl_histogram": kl_histogram(tokens.kl),
            "cache": {"layers": layers, "bytes_per_token": 12_240.0, "baseline_bytes_per_token": 46_080.0},
            "seconds": 12.5,
            "versions": versions(),
            "date": "2026-01-02T03:04:05+00:00",
            "notes": list(notes),
        }
    )
