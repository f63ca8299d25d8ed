"""Reports of gates and sweeps: whole files, right figures, nothing fetched from elsewhere."""

import json
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from bench_helpers import check_plot
from gate_helpers import LIMITS, record

from hf_paged_eval import files, report, sweep
from hf_paged_eval.gate_limits import Limit, Limits
from hf_paged_eval.gate_run import GateResult

HARMFUL = {"harm": 0.6}
OPEN = Limits({"ratio": Limit(1.005, 1.01)}, {"8k+": {"mean_kld": Limit(None, 0.02)}}, 100, source="test")


class Page(HTMLParser):
    """Tags that are open, words, and whatever the page would fetch."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.fetched = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        assert tag not in ("script", "link", "iframe")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def svg_of(text: str) -> str:
    return re.search(r"<svg.*?</svg>", text, re.DOTALL)[0]


def test_all_four_are_written(tmp_path):
    made = record(notes=["a <note> | here"])
    written = report.write_reports(made, tmp_path / "new" / "folder")
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == sorted(report.REPORTS.values())
    assert json.loads(written["json"].read_text()) == made
    page = Page(written["html"].read_text())
    assert not page.fetched and "url(" not in written["html"].read_text()
    words = " ".join(page.words)
    for word in ("example/model-1B, fp8_e4m3 per_token_head: passed", "a <note> | here", "text <of> & tests", "12,240"):
        assert word in words, word
    assert "not measured" in words  # the buckets beyond 1k
    labels = ["Perplexity by position", "KLD of single tokens", "Quantisation error by layer", "perplexity", "layer"]
    labels += [
        "position in the window (tokens, ranges up to)",
        "KLD (nats)",
        "tokens (%)",
        "relative error (%)",
        "change (%)",
    ]
    check_plot(svg_of(written["html"].read_text()), labels, panels=5)


def test_figures_are_those_of_the_record(tmp_path):
    made = record()
    overall = made["summary"]["overall"]
    text = report.markdown(made)
    assert f"| {overall['ratio']:.4f} |" in text and f"| {100 * overall['top1']:.2f} % |" in text
    assert f"Perplexity {overall['reference_perplexity']:.4f} without, {overall['perplexity']:.4f} with" in text
    assert report.gate_html(made).count(f"{overall['ratio']:.4f}") >= 2


@pytest.mark.parametrize(
    ("options", "outcome", "failures", "errors"),
    [({}, "pass", 0, 0), (HARMFUL, "fail", 3, 0), ({"limits": OPEN}, "inconclusive", 0, 1)],
)
def test_junit_counts(options, outcome, failures, errors):
    made = record(**options)
    assert made["outcome"] == outcome
    (suite,) = ElementTree.fromstring(report.junit(made))
    assert int(suite.get("tests")) == len(suite.findall("testcase")) == len(made["checks"])
    assert (int(suite.get("failures")), int(suite.get("errors"))) == (failures, errors)
    assert (len(suite.findall("testcase/failure")), len(suite.findall("testcase/error"))) == (failures, errors)
    assert all(case.get("name") and case.get("classname") for case in suite)


def test_an_open_question_reads_as_one():
    text = report.markdown(record(limits=OPEN))
    assert "inconclusive" in text.splitlines()[0] and "not measured" in text and "positions 8k+" in text


def test_a_gate_that_could_not_run_says_why(tmp_path):
    made = report.error_record(
        "no <such> model\x1b[31m", "org/model", {"kv_cache_dtype": "int8", "skip_layers": (0, 3)}
    )
    written = report.write_reports(made, tmp_path)
    (suite,) = ElementTree.fromstring(written["junit"].read_text())
    assert suite.get("errors") == "1" and "no <such> model" in suite.find("testcase/error").get("message")
    assert "could not run" in written["markdown"].read_text() and "no <such> model" in written["markdown"].read_text()
    assert "no <such> model" in " ".join(Page(written["html"].read_text()).words)
    assert json.loads(written["json"].read_text())["exit_code"] == 2


def test_a_candidate_without_finite_numbers_can_be_reported(tmp_path):
    made = record()
    made["summary"]["overall"].update(perplexity=None, ratio=None, kl_mean=None)
    for row in made["by_position"]:
        row.update(perplexity=None, ratio=None, kl_mean=None)
    for check in made["checks"][:1]:
        check.update(value=None, low=None, high=None, outcome="fail", message="no finite numbers")
    made["outcome"] = "fail"
    written = report.write_reports(made, tmp_path)
    assert "no finite number" in written["markdown"].read_text()
    Page(written["html"].read_text())


def test_what_was_there_stays_when_writing_fails(tmp_path, monkeypatch):
    file = files.write_text(tmp_path / "a.txt", "old")

    def broken(*args):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="full"):
        files.write_text(file, "new")
    assert file.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["a.txt"]


# -- sweeps ----------------------------------------------------------------------------------------


def swept(**harm):
    """A sweep whose formats do so much harm at so many bytes."""
    sizes = {"int8": 12_240, "fp8_e4m3": 12_240, "fp8_e5m2": 11_520, "k:int8,v:fp8_e4m3": 13_000}

    def gate(config):
        name = config["kv_cache_dtype"]
        if name not in harm:
            raise NotImplementedError(f"{name} is not built")
        made = record(harm=harm[name], limits=LIMITS)
        made["cache"] = {**made["cache"], "bytes_per_token": sizes[name] + 100 * len(config["skip_layers"])}
        return GateResult(None, made)

    skips = sweep.parse_skips(["none", "0,2"], lambda count: ())
    return sweep.run_sweep(sweep.candidates(list(sizes), skips=skips, base={"block_size": 16}), gate)


def test_the_smallest_that_passes_is_recommended(tmp_path):
    made = swept(int8=0.01, fp8_e4m3=0.05, fp8_e5m2=0.9, **{"k:int8,v:fp8_e4m3": 0.03})
    chosen = next(row for row in made["rows"] if row["number"] == made["recommended"])
    # As small as e4m3 and better; e5m2 is smaller and fails.
    assert chosen["candidate"]["kv_cache_dtype"] == "int8" and not chosen["candidate"]["skip_layers"]
    assert made["exit_code"] == 0 and "int8 per_token_head, 12,240 bytes a token (27 %" in sweep.advice(made)
    front = {row["candidate"]["kv_cache_dtype"] for row in made["rows"] if row["pareto"]}
    assert front == {"int8", "fp8_e5m2"}
    written = sweep.write_sweep(made, tmp_path)
    page = written["sweep.html"].read_text()
    assert not Page(page).fetched
    words = check_plot(
        svg_of(page), ["KV cache (bytes per token)", "perplexity", "KLD (nats)", "Pareto front"], panels=2
    )
    assert "int8" in words and "baseline" in words
    assert len(re.findall(r"<circle", svg_of(page))) == 2 * len(made["rows"])
    assert json.loads(written["sweep.json"].read_text()) == made
    assert written["sweep.md"].read_text().count("\n| ") == len(made["rows"]) + 1


def test_nothing_passes():
    made = swept(int8=0.9, fp8_e5m2=0.9)
    assert made["recommended"] is None and made["exit_code"] == 1 and "No format passes" in sweep.advice(made)
    made = swept()
    assert made["exit_code"] == 2 and all("is not built" in row["error"] for row in made["rows"])
    assert "is not built" in sweep.sweep_markdown(made)
    Page(sweep.sweep_html(made))


def test_pareto_front_of_equal_and_beaten_rows():
    rows = [
        {"number": number, "bytes_per_token": size, "perplexity": perplexity}
        for number, (size, perplexity) in enumerate(
            [(10, 5.0), (10, 5.0), (10, 6.0), (8, 7.0), (12, 5.0), (None, None)]
        )
    ]
    assert sweep.pareto(rows) == {0, 1, 3}


def test_candidates_and_skips():
    found = sweep.candidates(["auto", "int8"], ["per_token_head", "per_head"], [(), (1,)])
    assert len(found) == 5 and found[0] == {"kv_cache_dtype": "auto"}
    assert sweep.parse_skips(["none", "2,0", "worst:2", "0,2"], lambda count: range(count)) == [(), (0, 2), (0, 1)]
    for wrong in ("some", "worst:", "0,x"):
        with pytest.raises(ValueError, match="layers to skip"):
            sweep.parse_skips([wrong], lambda count: ())
    needs = [{"kv_cache_dtype": "int8", "kv_scale_granularity": one} for one in ("per_token_head", "per_head")]
    assert [sweep.needs_scales(one) for one in needs] == [False, True]
    assert sweep.needs_scales({"kv_cache_dtype": "int8", "kv_scale_granularity": "k:per_channel,v:per_token_head"})
    assert not sweep.needs_scales({"kv_cache_dtype": "int8", "kv_scale_granularity": "per_head", "kv_scales": "f"})
