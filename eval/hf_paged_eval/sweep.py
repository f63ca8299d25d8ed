"""Many cache formats of one model against its own dtype: which is the smallest that passes the gate?

Contract: every candidate is scored, measured and judged as `run_gate` does it, on the same text and by the limits of
its own dtype. Formats whose scales are fixed are calibrated first, on text that is not scored. The recommendation is
the candidate with the fewest bytes a token among those that pass, with or without warnings; of equals the one with the
smaller mean KLD.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .bench.charts import Panel, svg
from .files import write_text
from .gate import COULD_NOT_RUN
from .gate_run import GateResult, plain
from .gate_words import candidate_name, shown
from .report_html import badge, page, table

DYNAMIC = "per_token_head"
DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2")


def candidates(
    dtypes: Sequence[str],
    granularities: Sequence[str] = (DYNAMIC,),
    skips: Sequence[Sequence[int]] = ((),),
    base: Mapping | None = None,
) -> list[dict]:
    """Every combination as a cache config; `auto` only once, for it has neither scales nor layers to skip.

    Args:
        base: fields that all have, such as the block size.
    """
    found = []
    for dtype, granularity, skip in itertools.product(dtypes, granularities, skips):
        if dtype == "auto":
            one = {**(base or {}), "kv_cache_dtype": "auto"}
        else:
            one = {
                **(base or {}),
                "kv_cache_dtype": dtype,
                "kv_scale_granularity": granularity,
                "skip_layers": tuple(skip),
            }
        if one not in found:
            found.append(one)
    return found


def run_sweep(
    configs: Sequence[Mapping],
    gate: Callable[[Mapping], GateResult],
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """Gate each config; one that cannot run is a row that says why.

    Args:
        configs: cache configs.
        gate: runs one of them.
        say: gets a line before each.
    Returns:
        The record: rows in the order of the configs, which of them are on the Pareto front, the recommendation.
    """
    rows, about = [], None
    for number, config in enumerate(configs, 1):
        name = candidate_name(config)
        say(f"{number} of {len(configs)}: {name}")
        try:
            record = gate(config).record
        except (ValueError, NotImplementedError, RuntimeError) as error:
            rows.append({"number": number, "name": name, "candidate": plain(config), "error": str(error)})
            rows[-1] |= {"outcome": "error", "bytes_per_token": None, "perplexity": None}
            continue
        about = about or record
        overall, cache = record["summary"]["overall"], record["cache"] or {}
        rows.append(
            {
                "number": number,
                "name": name,
                "candidate": plain(config),
                "outcome": record["outcome"],
                "more_tokens": record["more_tokens"],
                "bytes_per_token": cache.get("bytes_per_token"),
                "baseline_bytes_per_token": cache.get("baseline_bytes_per_token"),
                "checks": record["checks"],
                "limits": record["limits"]["source"],
                "error": None,
                **{name: overall[name] for name in ("perplexity", "reference_perplexity", "ratio", "kl_mean", "top1")},
            }
        )
    front = pareto(rows)
    for row in rows:
        row["pareto"] = row["number"] in front
    chosen = recommend(rows)
    shared = {} if about is None else {part: about[part] for part in ("model", "corpus", "settings", "num_tokens")}
    dates = {} if about is None else {part: about[part] for part in ("versions", "date")}
    outcome, exit_code = _outcome(rows, chosen)
    return {
        "record": 1,
        "kind": "sweep",
        "outcome": outcome,
        "exit_code": exit_code,
        "recommended": None if chosen is None else chosen["number"],
        **shared,
        **dates,
        "rows": rows,
    }


def pareto(rows: Iterable[Mapping]) -> set[int]:
    """Numbers of the rows that no other beats: fewer bytes and no more perplexity, or as many and less."""
    measured = [row for row in rows if row["bytes_per_token"] is not None and row["perplexity"] is not None]
    front = set()
    for row in measured:
        beaten = any(
            other["bytes_per_token"] <= row["bytes_per_token"]
            and other["perplexity"] <= row["perplexity"]
            and (other["bytes_per_token"], other["perplexity"]) != (row["bytes_per_token"], row["perplexity"])
            for other in measured
        )
        if not beaten:
            front.add(row["number"])
    return front


def recommend(rows: Iterable[Mapping]) -> Mapping | None:
    """The smallest row that passes, or None."""
    passing = [row for row in rows if row["outcome"] in ("pass", "warn") and row["bytes_per_token"] is not None]
    return min(passing, key=lambda row: (row["bytes_per_token"], row["kl_mean"]), default=None)


def _outcome(rows: Sequence[Mapping], chosen: Mapping | None) -> tuple[str, int]:
    """As for a gate: 0 where there is something to recommend, else what the best hope came to."""
    if chosen is not None:
        return chosen["outcome"], 0
    outcomes = {row["outcome"] for row in rows}
    if "inconclusive" in outcomes:
        return "inconclusive", 3
    return ("fail", 1) if "fail" in outcomes else ("error", COULD_NOT_RUN)


# -- reports ---------------------------------------------------------------------------------------

HEAD = ["", "format", "bytes / token", "perplexity", "ratio", "mean KLD (nats)", "top-1", "outcome", "Pareto"]


def table_rows(record: Mapping) -> list[list[str]]:
    """Cells of the table, smallest first, those without figures last."""
    lines = []
    for row in sorted(record["rows"], key=lambda row: (row["bytes_per_token"] is None, row["bytes_per_token"] or 0)):
        if row["error"] is not None:
            lines.append([str(row["number"]), row["name"], "-", "-", "-", "-", "-", f"error: {row['error']}", ""])
            continue
        size = "-" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:,.0f}"
        outcome = row["outcome"]
        if row.get("more_tokens"):
            outcome += f", needs about {row['more_tokens']:,} more tokens"
        perplexity = "-" if row["perplexity"] is None else f"{row['perplexity']:.4f}"
        figures = [shown(metric, row[name]) for metric, name in _SHOWN]
        mark = "recommended" if row["number"] == record["recommended"] else "yes" if row["pareto"] else ""
        lines.append([str(row["number"]), row["name"], size, perplexity, *figures, outcome, mark])
    return lines


_SHOWN = (("ratio", "ratio"), ("mean_kld", "kl_mean"), ("top1", "top1"))


def advice(record: Mapping) -> str:
    """The recommendation in a sentence."""
    number = record["recommended"]
    if number is None:
        return f"No format passes ({record['outcome']})."
    row = next(row for row in record["rows"] if row["number"] == number)
    share = row["bytes_per_token"] / row["baseline_bytes_per_token"]
    warned = ", with warnings" if row["outcome"] == "warn" else ""
    return (
        f"Recommended: {row['name']}, {row['bytes_per_token']:,.0f} bytes a token ({100 * share:.0f} % of the model's "
        f"own dtype), the smallest that passes{warned}."
    )


def sweep_markdown(record: Mapping) -> str:
    lines = [f"### KV cache sweep: {record.get('model', {}).get('name', 'no model')}", "", advice(record), ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * 5 + "---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table_rows(record)]
    return "\n".join(lines) + "\n"


def sweep_html(record: Mapping) -> str:
    name = record.get("model", {}).get("name", "no model")
    title = f"KV cache sweep: {name}"
    cells = table_rows(record)
    outcomes = {str(row["number"]): row["outcome"] for row in record["rows"]}
    for row in cells:
        if row[7] == outcomes[row[0]]:
            row[7] = badge(row[7])
    body = [f"<h1>{escape(title)}</h1>", f"<p><strong>{escape(advice(record))}</strong></p>"]
    body.append(table(HEAD, cells, text=(0, 1, 7, 8)))
    panels = sweep_panels(record)
    if panels:
        body += ['<div class="plot">', svg(panels, "Bytes against quality"), "</div>"]
        body.append('<p class="small">The dashed line joins the formats that no other beats in both.</p>')
    if "num_tokens" in record:
        corpus = record["corpus"]["name"]
        body.append(
            f'<p class="small">{record["num_tokens"]:,} tokens of {escape(corpus)}, {escape(record["date"])}</p>'
        )
    return page(title, body)


def sweep_panels(record: Mapping) -> list[Panel]:
    """Bytes a token against perplexity, and against mean KLD; a series a dtype."""
    rows = [row for row in record["rows"] if row["bytes_per_token"] is not None and row["perplexity"] is not None]
    if not rows:
        return []
    series: dict[str, list] = {}
    divergence: dict[str, list] = {}
    for row in rows:
        dtype = candidate_name({"kv_cache_dtype": row["candidate"]["kv_cache_dtype"]})
        series.setdefault(dtype, []).append((row["bytes_per_token"], row["perplexity"]))
        divergence.setdefault(dtype, []).append((row["bytes_per_token"], row["kl_mean"]))
    ends = [choose(row["bytes_per_token"] for row in rows) for choose in (min, max)]
    own = [(end, rows[0]["reference_perplexity"]) for end in ends]
    dots = frozenset(series)
    front = sorted((row["bytes_per_token"], row["perplexity"]) for row in rows if row["pareto"])
    label = "KV cache (bytes per token)"
    return [
        Panel(
            "Perplexity by bytes",
            label,
            "perplexity",
            {**series, "Pareto front": front, "baseline": own},
            dashed=frozenset({"Pareto front", "baseline"}),
            dots=dots,
            zoom=True,
        ),
        Panel("Mean KLD by bytes", label, "KLD (nats)", divergence, dots=dots),
    ]


def write_sweep(record: Mapping, folder: str | Path) -> dict[str, Path]:
    """Write sweep.json, sweep.md and sweep.html into a folder.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(folder)
    made = {
        "sweep.json": json.dumps(record, indent=1) + "\n",
        "sweep.md": sweep_markdown(record),
        "sweep.html": sweep_html(record),
    }
    return {name: write_text(folder / name, text) for name, text in made.items()}


def parse_skips(given: Sequence[str], worst: Callable[[int], Sequence[int]]) -> list[tuple[int, ...]]:
    """Sets of layers to skip: "none", "0,1", or "worst:2" for those with the largest quantisation errors.

    Args:
        worst: gives the layers of a "worst:N".
    Raises:
        ValueError: one is none of these.
    """
    found: list[tuple[int, ...]] = []
    for text in given:
        kind, _, count = text.partition(":")
        try:
            if text == "none":
                layers: tuple[int, ...] = ()
            elif kind == "worst":
                layers = tuple(worst(int(count)))
            else:
                layers = tuple(sorted({int(part) for part in text.split(",")}))
        except ValueError as error:
            raise ValueError(f"layers to skip must be none, numbers as in 0,1, or worst:2, got {text!r}") from error
        if layers not in found:
            found.append(layers)
    return found


def needs_scales(config: Mapping[str, Any]) -> bool:
    """Whether a config has fixed scales and no file with them."""
    granularity = config.get("kv_scale_granularity", DYNAMIC)
    spelled = granularity.values() if isinstance(granularity, Mapping) else [granularity]
    parts = {part.rpartition(":")[2] for text in spelled for part in str(text).split(",")}
    return config.get("kv_cache_dtype", "auto") != "auto" and parts != {DYNAMIC} and not config.get("kv_scales")
