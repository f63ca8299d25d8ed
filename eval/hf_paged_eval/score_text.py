"""What `hf-paged eval score` prints.

Contract: tables with a line for all tokens and one for each position bucket; a bucket without tokens reads "not
measured". Units stand in the headings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from .metrics import Normalised, Stats, Summary
from .tables import figures_table


def print_score(result, summary: Summary, units: Normalised) -> None:
    """Print the figures of one `score`."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    compares = result.reference_perplexity is not None
    columns = ["tokens", "perplexity", *(["reference", "log ratio, 1e-3 nats"] if compares else [])]
    console.print(_table("Perplexity by tokens of context", columns, summary, _perplexity))
    line = f"by token {units.token_perplexity:.4f}"
    if units.word_perplexity is not None:
        line += f", by word {units.word_perplexity:.2f}"
    if units.byte_perplexity is not None:
        line += f", by byte {units.byte_perplexity:.4f} ({units.bits_per_byte:.4f} bits per byte)"
    console.print(f"perplexity {line}; {result.seconds:.1f} s\n")
    if not compares:
        return
    columns = ["mean KLD", "median", "99 %", "99.9 %", "most", "top-1 same, %", "RMS dp, %"]
    title = "Divergence from the reference by tokens of context, KLD in 1e-3 nats"
    console.print(_table(title, columns, summary, _divergence))
    stats = summary.overall
    spread = "unknown, too few tokens" if stats.log_ratio_se is None else f"{stats.log_ratio_se:.5f}"
    console.print(
        f"ratio to the reference {stats.ratio:.5f}, standard error of its logarithm {spread} "
        f"({stats.num_blocks} blocks of neighbouring tokens)"
    )


def _table(title: str, columns: list[str], summary: Summary, cells: Callable[[Stats], list[str]]) -> Table:
    rows = [["all", *cells(summary.overall)]]
    rows += [[name, *(["not measured"] if stats is None else cells(stats))] for name, stats in summary.buckets.items()]
    return figures_table(title, ["context", *columns], rows)


def _perplexity(stats: Stats) -> list[str]:
    cells = [f"{stats.num_tokens:,}", f"{stats.perplexity:.4f}"]
    if stats.reference_perplexity is None:
        return cells
    return [*cells, f"{stats.reference_perplexity:.4f}", _with_error(stats.log_ratio, stats.log_ratio_se, 1e3)]


def _divergence(stats: Stats) -> list[str]:
    return [
        _with_error(stats.kl_mean, stats.kl_se, 1e3),
        *(f"{value * 1e3:.3f}" for value in (stats.kl_median, stats.kl_p99, stats.kl_p999, stats.kl_max)),
        _with_error(stats.top1, stats.top1_se, 100),
        f"{stats.rms_prob * 100:.3f}",
    ]


def _with_error(value: float, error: float | None, scale: float) -> str:
    return f"{value * scale:.3f}" + ("" if error is None else f" ± {error * scale:.3f}")
