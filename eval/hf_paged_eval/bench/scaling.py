"""How the time of a step grows with the batch and with the context.

Contract: steps of steady decode are timed, one sweep over batches at one context and one over contexts at one batch.
The cost must grow linearly with the tokens attended to. A line is fitted to each sweep, and a parabola: `quadratic` is
the share of the largest point's time that the parabola's square term takes; `r2` how much of the variance the line
explains. Both fits weigh the relative error, so that small cases count as much as large ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from .charts import Panel, svg
from .setting import Bench, kv_bytes_per_token
from .steady import Steady

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_BATCHES, QUICK_CONTEXTS = (1, 2, 4, 8), (32, 64, 128)


def run(
    bench: Bench,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    at_context: int = 128,
    at_batch: int = 4,
    steps: int | None = None,
    compile: bool = False,
) -> dict:
    """Time both sweeps.

    Args:
        bench: the model and its options.
        batches, at_context: batches, and the context that each of their requests has.
        contexts, at_batch: contexts, and how many requests have each.
        steps: measured for each point; None for 16 (4 in a quick run).
        compile: as ContinuousBatcher takes it.
    Raises:
        ValueError: less than three points in a sweep, or a context beyond the model's positions.
    """
    quick = bench.setting.quick
    batches = sorted(set(batches or (QUICK_BATCHES if quick else BATCHES)))
    contexts = sorted(set(contexts or (QUICK_CONTEXTS if quick else CONTEXTS)))
    steps = (4 if quick else 16) if steps is None else steps
    at_context = min(at_context, 32) if quick else at_context
    if len(batches) < 3 or len(contexts) < 3:
        raise ValueError(f"a fit needs three points of each sweep, got batches {batches} and contexts {contexts}")
    positions = getattr(bench.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max(*contexts, at_context) > positions:
        raise ValueError(f"context {max(*contexts, at_context)} is beyond the model's {positions} positions")
    sweeps = {}
    with Steady(bench.model, max(*batches, at_batch), compile) as steady:
        steady.at(1, min(contexts), steps)  # warms up
        for name, points in (
            ("batch", [(batch, at_context) for batch in batches]),
            ("context", [(at_batch, context) for context in contexts]),
        ):
            rows = []
            for batch, context in points:
                bench.say(f"{name}: {batch} requests at {context} tokens")
                seconds = steady.at(batch, context, steps)
                rows.append(
                    {
                        "batch": batch,
                        "context": context,
                        "tokens": batch * context,
                        "ms": 1000 * statistics.median(seconds),
                        "ms_least": 1000 * min(seconds),
                    }
                )
            fits = fit([row[name] for row in rows], [row["ms"] for row in rows])
            sweeps[name] = {"points": rows, "fit": fits}
    per_ms = sweeps["context"]["fit"]["slope"]
    bytes_of_kv = at_batch * kv_bytes_per_token(bench.model)
    return {
        "sweeps": sweeps,
        "steps": steps,
        # What one token more of context costs, as bytes of KV read in that time.
        "kv_gb_per_second": bytes_of_kv / per_ms / 1e6 if per_ms > 0 else None,
    }


def fit(x: Sequence[float], y: Sequence[float]) -> dict:
    """A line and a parabola by least squares of the relative error.

    Returns:
        `intercept` and `slope` of the line, `r2`, and `quadratic`: the square term's share of the parabola at the
        largest x.
    """
    values, times = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    weights = 1 / times

    def solve(degree: int) -> torch.Tensor:
        powers = torch.stack([(values / values.max()) ** power for power in range(degree + 1)], 1)
        return torch.linalg.lstsq(powers * weights[:, None], (times * weights)[:, None]).solution[:, 0]

    intercept, slope = solve(1).tolist()
    line = intercept + slope * values / values.max()
    off, spread = (times - line).square().sum(), (times - times.mean()).square().sum()
    parabola = solve(2)
    return {
        "intercept": intercept,
        "slope": slope / max(x),
        "r2": float(1 - off / spread) if spread > 0 else 1.0,
        "quadratic": float(parabola[2] / parabola.sum()),
    }


def report(bench: Bench, results: dict) -> None:
    for name, sweep in results["sweeps"].items():
        rows = [
            [f"{row['batch']} x {row['context']:,}", f"{row['tokens']:,}", f"{row['ms']:.2f}", f"{row['ms_least']:.2f}"]
            for row in sweep["points"]
        ]
        bench.table(f"by {name}", ["requests x context", "tokens attended to", "ms a step", "fastest"], rows)
        line = sweep["fit"]
        bench.console.print(
            f"  {line['intercept']:.2f} ms + {1000 * line['slope']:.3g} us for each {UNIT[name]}, R2 {line['r2']:.4f}; "
            f"a square term would be {100 * line['quadratic']:.1f} % of the largest step"
        )
    if results["kv_gb_per_second"]:
        bench.console.print(f"  context is read at {results['kv_gb_per_second']:.1f} GB/s of keys and values")


UNIT = {"batch": "request", "context": "token of context"}


def draw(record: dict) -> str:
    """Both sweeps with their lines."""
    panels = []
    for name, label in (("batch", "requests in the batch"), ("context", "context (tokens of each request)")):
        sweep = record["results"]["sweeps"][name]
        points, line = sweep["points"], sweep["fit"]
        other = "context" if name == "batch" else "batch"
        lines = {
            "measured": [(row[name], row["ms"]) for row in points],
            "line": [(row[name], max(1e-3, line["intercept"] + line["slope"] * row[name])) for row in points],
        }
        fixed = f"{points[0][other]:,} tokens each" if name == "batch" else f"{points[0][other]} requests"
        title = f"Step time by {name} ({fixed})"
        panels.append(Panel(title, label, "ms a step", lines, log_x=True, log_y=True, dashed=frozenset({"line"})))
    return svg(panels, f"Scaling of decode, {record['setting']['model']}, {record['setting']['dtype']}")
