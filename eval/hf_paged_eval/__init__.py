"""hf_paged_eval: the evaluation room.

Contract: this room measures what paging and smaller KV formats do to a model's text and
speed (perplexity, KL divergence, gates, benchmarks). It sees hf_paged only as a user does:
the public names of `hf_paged` itself, never its submodules, so whatever it reports is what a
user would get. Nothing in hf_paged imports it, except the console script, inside commands.

`score` reads texts through the paged cache, `load_corpus` brings them, `summarize` makes figures of the outcome;
`bench` measures continuous batching.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agreement import Agreement, greedy_agreement
    from .corpus import Corpus, load_corpus, make_corpus
    from .metrics import Normalised, Stats, Summary, normalise, summarize
    from .needle import NeedleResult, needle_task
    from .scoring import ScoreResult, score
    from .token_table import TokenTable
    from .windows import Window, rolling_windows

METRIC_PATH = str(Path(__file__).parent / "evaluate_metric")

# Imported when they are asked for: pytest imports this package for its plugin, and nothing heavy with it.
_MODULES = {
    "agreement": ("Agreement", "greedy_agreement"),
    "corpus": ("Corpus", "load_corpus", "make_corpus"),
    "metrics": ("Normalised", "Stats", "Summary", "normalise", "summarize"),
    "needle": ("NeedleResult", "needle_task"),
    "scoring": ("ScoreResult", "score"),
    "token_table": ("TokenTable",),
    "windows": ("Window", "rolling_windows"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "METRIC_PATH",
    "Agreement",
    "Corpus",
    "NeedleResult",
    "Normalised",
    "ScoreResult",
    "Stats",
    "Summary",
    "TokenTable",
    "Window",
    "greedy_agreement",
    "load_corpus",
    "make_corpus",
    "needle_task",
    "normalise",
    "rolling_windows",
    "score",
    "summarize",
]


def __getattr__(name: str):
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
