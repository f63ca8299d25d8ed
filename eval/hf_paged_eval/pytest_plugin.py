"""The quality gate inside pytest: the fixture `hf_paged_gate`, and a marker of the same name for its settings.

    @pytest.mark.hf_paged_gate(kv_cache_dtype="fp8_e4m3", max_tokens=5000)
    def test_kv_cache(hf_paged_gate, model, tokenizer):
        hf_paged_gate(model, tokenizer)

Contract: the call fails the test on a regression and on an open question, with the table in the message, and returns
the GateResult otherwise. pytest loads this module in every run of an environment that has hf_paged, so it imports
nothing heavy before the fixture is called.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

SETTINGS = ("kv_cache_dtype", "kv_scale_granularity", "kv_scales", "skip_layers", "rotate_keys", "block_size")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_paged")
    group.addoption(
        "--hf-paged-gate-report", metavar="DIR", help="write the reports of hf_paged gates into this folder"
    )
    group.addoption("--hf-paged-gate-config", metavar="FILE", help="a gates.toml for hf_paged gates that name none")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "hf_paged_gate(**settings): settings of this test's `hf_paged_gate` calls: fields of the cache config "
        "(kv_cache_dtype, ...), of the text (documents, dataset, max_tokens, ...), config, max_length, stride",
    )


@pytest.fixture
def hf_paged_gate(request: pytest.FixtureRequest):
    """Hold a model with an 8-bit KV cache against the limits for it; see docs/quality_gate.md.

    `hf_paged_gate(model, tokenizer=None, documents=None, **settings)`: `documents` are lists of token ids, or, with a
    tokenizer, None for the embedded text or the data set that the settings name. Settings are those of the marker and
    of the call, the call's first.
    """
    calls = []

    def gate(model, tokenizer=None, documents=None, **settings):
        for marker in request.node.iter_markers("hf_paged_gate"):
            if marker.args:
                raise pytest.UsageError("the marker hf_paged_gate takes settings by name only")
            settings = {**marker.kwargs, **settings}
        calls.append(None)
        return _run(request, len(calls), model, tokenizer, documents, settings)

    return gate


def _run(request, number, model, tokenizer, documents, settings):
    from rich.console import Console

    from .gate import Outcome
    from .gate_cli import show
    from .gate_run import Text, run_gate
    from .gate_text import text_of
    from .report import write_reports

    documents = settings.pop("documents", None) if documents is None else documents
    candidate = {name: settings.pop(name) for name in SETTINGS if name in settings}
    candidate.setdefault("kv_cache_dtype", "fp8_e4m3")
    settings.setdefault("config", request.config.getoption("--hf-paged-gate-config"))
    source = {
        name: settings.pop(name)
        for name in ("dataset", "subset", "split", "column", "path", "bos", "max_tokens")
        if name in settings
    }
    if documents is None or isinstance(documents, str):  # "apart" or "joined": how a corpus is cut
        if tokenizer is None:
            raise pytest.UsageError("hf_paged_gate needs a tokenizer, or documents of token ids")
        source.setdefault("max_tokens", 5000)
        text = text_of(tokenizer, documents=documents or "apart", **source)
    elif source:
        raise pytest.UsageError(f"hf_paged_gate: {', '.join(source)} are of no use with documents of token ids")
    else:
        text = Text([list(document) for document in documents])
    result = run_gate(model, text, candidate, **settings)
    folder = request.config.getoption("--hf-paged-gate-report")
    if folder:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.nodeid).strip("-.") + (f"-{number}" if number > 1 else "")
        write_reports(result.record, Path(folder) / name)
    printed = io.StringIO()
    show(result.record, Console(file=printed, width=160, highlight=False))
    if result.verdict.outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        pytest.fail(printed.getvalue(), pytrace=False)
    print(printed.getvalue())
    return result
