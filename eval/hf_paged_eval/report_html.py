"""Reports for people: one HTML file each, with its plots as SVG inside and nothing fetched from elsewhere.

Contract: made from the record alone. Every plot has a title, and axes with units. Light and dark pages look the same:
the colours are set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from .bench.charts import Panel, svg
from .gate_words import METRIC_NAMES, headline, interval, scope_name, shown

COLOURS = {"pass": "#1a7f37", "warn": "#9a6700", "fail": "#b42318", "inconclusive": "#6e40c9", "error": "#b42318"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1020px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin: 0.6em 0; font-size: 14px; }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td { white-space: nowrap; }
td.text { white-space: normal; }
th { background: #f5f5f5; font-weight: 600; }
.badge { color: #fff; border-radius: 4px; padding: 0.15em 0.6em; font-weight: 600; white-space: nowrap; }
.plot { overflow-x: auto; } .plot svg { max-width: 100%; height: auto; }
.small { color: #555; font-size: 13px; } pre { background: #f5f5f5; padding: 0.8em; overflow-x: auto; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole document."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence], text: Sequence[int] = (0,)) -> str:
    """Rows of cells; a cell that begins with "<span" is taken as HTML. Columns `text` are set to the left."""
    kind = ['class="text"' if index in text else "" for index in range(len(head))]
    lines = ["<table><thead><tr>", *(f"<th {kind[i]}>{escape(one)}</th>" for i, one in enumerate(head))]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        cells = (one if (one := str(cell)).startswith("<span") else escape(one) for cell in row)
        lines.append("<tr>" + "".join(f"<td {kind[i]}>{cell}</td>" for i, cell in enumerate(cells)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def badge(outcome: str) -> str:
    return f'<span class="badge" style="background:{COLOURS[outcome]}">{escape(outcome)}</span>'


def gate_html(record: Mapping) -> str:
    """The report of a gate."""
    title = f"KV cache gate: {headline(record)}"
    body = [f"<h1>{badge(record['outcome'])} {escape(title)}</h1>"]
    if record.get("error"):
        return page(title, [*body, f"<pre>{escape(record['error'])}</pre>"])
    body += [f"<p>{escape(note)}</p>" for note in record["notes"]]
    body += ["<h2>Checks</h2>", _checks(record), "<h2>By position</h2>", _buckets(record)]
    body += ['<h2>Plots</h2><div class="plot">', svg(gate_panels(record), "Candidate against baseline"), "</div>"]
    body += ["<h2>Of what, and how</h2>", _about(record)]
    body.append(
        '<p class="small">A check passes when its value and two standard errors lie within the limit, fails when they '
        "lie beyond it, and is inconclusive otherwise. KLD is KL(baseline || candidate) of the next token's "
        "distribution.</p>"
    )
    return page(title, body)


def _checks(record: Mapping) -> str:
    head = ["where", "metric", "value", "± two standard errors", "warn", "fail", "tokens", "outcome", "why"]
    rows = []
    for check in record["checks"]:
        metric = check["metric"]
        row = [scope_name(check["scope"]), METRIC_NAMES[metric], shown(metric, check["value"]), interval(check)]
        row += [shown(metric, check["warn"]), shown(metric, check["fail"]), f"{check['num_tokens']:,}"]
        rows.append([*row, badge(check["outcome"]), check["message"]])
    return table(head, rows, text=(0, 1, 7, 8))


def _buckets(record: Mapping) -> str:
    head = ["positions", "tokens", "perplexity, baseline", "perplexity, candidate", "ratio", "KLD mean", "KLD median"]
    head += ["KLD 99 %", "KLD 99.9 %", "KLD max", "top-1", "RMS change of p"]
    names = ["num_tokens", "reference_perplexity", "perplexity", "ratio", "kl_mean", "kl_median", "kl_p99", "kl_p999"]
    names += ["kl_max", "top1", "rms_prob"]
    rows = []
    for scope, stats in {"all": record["summary"]["overall"], **record["summary"]["buckets"]}.items():
        if stats is None:
            rows.append([scope, "not measured", *[""] * (len(head) - 2)])
        else:
            rows.append([scope, *(_figure(name, stats.get(name)) for name in names)])
    return table(head, rows)


def _figure(name: str, value) -> str:
    if value is None:
        return "-"
    if name == "num_tokens":
        return f"{value:,}"
    if name == "top1":
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if name in ("ratio", "perplexity", "reference_perplexity") else f"{value:.3g}"


def _about(record: Mapping) -> str:
    rows = []
    for part in ("model", "candidate", "corpus", "bits_per_byte", "settings", "baseline", "versions"):
        for key, value in (record.get(part) or {}).items():
            rows.append([part, key, value if isinstance(value, str) else json.dumps(value)])
    cache = record.get("cache")
    if cache:
        rows.append(["cache", "bytes per token", f"{cache['bytes_per_token']:,.0f}"])
        rows.append(["cache", "bytes per token, baseline", f"{cache['baseline_bytes_per_token']:,.0f}"])
    rows.append(["limits", "from", record["limits"]["source"]])
    rows.append(["run", "seconds of scoring", f"{record['seconds']:.1f}"])
    rows.append(["run", "date", record["date"]])
    return table(["", "", ""], rows, text=(0, 1, 2))


# -- plots -----------------------------------------------------------------------------------------


def gate_panels(record: Mapping) -> list[Panel]:
    """Perplexity by position, its change, the KLD histogram, errors by layer: as many as there are data for."""
    panels = []
    rows = [row for row in record["by_position"] if None not in (row["perplexity"], row["ratio"], row["kl_mean"])]
    if rows:
        where = "position in the window (tokens, ranges up to)"
        own = [(row["high"], row["reference_perplexity"]) for row in rows]
        series = {"candidate": [(row["high"], row["perplexity"]) for row in rows], "baseline": own}
        dashed = frozenset({"baseline"})
        panels.append(Panel("Perplexity by position", where, "perplexity", series, log_x=True, dashed=dashed))
        change = [(row["high"], 100 * (row["ratio"] - 1), 100 * row["ratio"], row["log_ratio_se"]) for row in rows]
        panels.append(_with_errors("Change of perplexity by position", where, "change (%)", change))
        kl = [(row["high"], row["kl_mean"], 1.0, row["kl_se"]) for row in rows]
        panels.append(_with_errors("Mean KLD by position", where, "KLD (nats)", kl))
    bars = _histogram(record["kl_histogram"])
    panels.append(Panel("KLD of single tokens", "KLD (nats)", "tokens (%)", {"tokens": bars}, bars=True))
    layers = (record.get("cache") or {}).get("layers") or []
    if layers:
        series = {
            name: [(layer["layer"], 100 * layer[part]) for layer in layers if layer[part] is not None]
            for name, part in (("keys", "key"), ("values", "value"))
        }
        if all(series.values()):
            panels.append(Panel("Quantisation error by layer", "layer", "relative error (%)", series))
    return panels


def _with_errors(title: str, x_label: str, y_label: str, points: Sequence[tuple]) -> Panel:
    """A line, and two standard errors (each times a factor) to both sides where they are known."""
    series = {"candidate": [(x, value) for x, value, _, _ in points]}
    known = [(x, value, 2 * factor * error) for x, value, factor, error in points if error is not None]
    if known:
        series["+ two standard errors"] = [(x, value + error) for x, value, error in known]
        series["- two standard errors"] = [(x, value - error) for x, value, error in known]
    return Panel(title, x_label, y_label, series, log_x=True, dashed=frozenset(series) - {"candidate"})


def _histogram(rows: Sequence[Mapping]) -> list[tuple[str, float]]:
    """Bars between the first and the last range that has tokens, named by where they begin."""
    filled = [index for index, row in enumerate(rows) if row["share"] > 0] or [0]
    kept = rows[filled[0] : filled[-1] + 1]
    return [(_short(row), 100 * row["share"]) for row in kept]


def _short(row: Mapping) -> str:
    if row["low"] == 0:
        return f"<{row['high']:.0e}".replace("e-0", "e-")
    low = row["low"]
    return f"{low:.2g}" if low >= 0.01 else f"{low:.0e}".replace("e-0", "e-")
