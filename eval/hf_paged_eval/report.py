"""What a gate leaves behind: JSON, JUnit XML, Markdown and HTML, all made from the one record of a run.

Contract: `write_reports` writes every file whole. A gate that could not run leaves a record, too, so that a CI page
shows why and not the report of an earlier run. Inconclusive and could not run are errors in JUnit: neither is a pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from .files import write_text
from .gate_words import METRIC_NAMES, candidate_name, headline, interval, scope_name, shown
from .report_html import gate_html

REPORTS = {"json": "report.json", "junit": "junit.xml", "markdown": "summary.md", "html": "report.html"}


def write_reports(record: Mapping, folder: str | Path) -> dict[str, Path]:
    """Write all reports of a gate's record into a folder, which is made if need be.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(folder)
    made = {
        "json": json.dumps(record, indent=1) + "\n",
        "junit": junit(record),
        "markdown": markdown(record),
        "html": gate_html(record),
    }
    return {kind: write_text(folder / REPORTS[kind], text) for kind, text in made.items()}


def error_record(error: str, model: str, candidate: Mapping) -> dict:
    """The record of a gate that could not run."""
    return {
        "record": 1,
        "kind": "gate",
        "outcome": "error",
        "exit_code": 2,
        "error": error,
        "model": {"name": model},
        "candidate": dict(candidate),
        "checks": [],
        "notes": [],
    }


# -- formats ---------------------------------------------------------------------------------------


def markdown(record: Mapping) -> str:
    """For the page of a CI job."""
    lines = [f"### KV cache gate: {_cell(headline(record))}", ""]
    if record.get("error"):
        return "\n".join([*lines, "```", record["error"].replace("```", "'''"), "```", ""])
    lines += [
        "| where | metric | value | two standard errors | warn | fail | tokens | outcome |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for check in record["checks"]:
        metric = check["metric"]
        cells = [scope_name(check["scope"]), METRIC_NAMES[metric], shown(metric, check["value"]), interval(check)]
        cells += [shown(metric, check["warn"]), shown(metric, check["fail"]), f"{check['num_tokens']:,}"]
        outcome = check["outcome"] + (f": {check['message']}" if check["message"] else "")
        lines.append("| " + " | ".join(map(_cell, [*cells, outcome])) + " |")
    overall = record["summary"]["overall"]
    lines += [
        "",
        f"Perplexity {overall['reference_perplexity']:.4f} without, {_perplexity(overall['perplexity'])} with the "
        f"candidate, over {record['num_tokens']:,} tokens of {_cell(record['corpus']['name'])}. "
        f"Limits: {_cell(record['limits']['source'])}.",
        "",
    ]
    lines += [f"- {_cell(note)}" for note in record["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def junit(record: Mapping) -> str:
    """One test case a check, as CI systems read it."""
    checks = record["checks"]
    failures = sum(check["outcome"] == "fail" for check in checks)
    errors = sum(check["outcome"] == "inconclusive" for check in checks) + bool(record.get("error"))
    name = f"hf-paged gate: {record['model']['name']}, {candidate_name(record['candidate'])}"
    count = max(1, len(checks))
    about = {"name": name, "tests": str(count), "failures": str(failures), "errors": str(errors), "skipped": "0"}
    if "seconds" in record:
        about["time"] = f"{record['seconds']:.3f}"
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", about)
    class_name = f"hf_paged_gate.{record['model']['name'].replace('.', '_')}"
    if record.get("error"):
        case = ElementTree.SubElement(suite, "testcase", {"classname": class_name, "name": "run", "time": "0"})
        ElementTree.SubElement(case, "error", {"type": "could not run", "message": _xml(record["error"])})
    for check in checks:
        title = f"{METRIC_NAMES[check['metric']]}, {scope_name(check['scope'])}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": class_name, "name": title, "time": "0"})
        text = f"{shown(check['metric'], check['value'])} ({interval(check)}), {check['num_tokens']:,} tokens"
        if check["outcome"] in ("fail", "inconclusive"):
            kind = "failure" if check["outcome"] == "fail" else "error"
            element = ElementTree.SubElement(
                case, kind, {"type": check["outcome"], "message": _xml(check["message"] or check["outcome"])}
            )
            element.text = text
        else:
            out = ElementTree.SubElement(case, "system-out")
            out.text = _xml(f"{text} {check['outcome']} {check['message']}".rstrip())
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _perplexity(value: float | None) -> str:
    return "no finite number" if value is None else f"{value:.4f}"


def _xml(text: str) -> str:
    """Without what XML cannot hold, such as the colours of a terminal."""
    return "".join(letter for letter in text if letter in "\t\n" or ord(letter) >= 32)
