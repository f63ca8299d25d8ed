"""What makes the gate usable in other projects' CI: the action, the workflow, the pytest plugin."""

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

yaml = pytest.importorskip("yaml")
pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
FAKE = """#!{python}
import json, os, sys
from pathlib import Path
Path(os.environ["CALLED"]).write_text(json.dumps(sys.argv[1:]))
folder = Path(sys.argv[sys.argv.index("--report") + 1])
status = int(os.environ["STATUS"])
if status != 9:
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({{"outcome": os.environ["OUTCOME"]}}))
    (folder / "summary.md").write_text("### a summary\\n")
sys.exit(status)
"""


def run_step(tmp_path, status, outcome, **inputs):
    """Run the action's own script with a stand-in for hf-paged."""
    step = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "gate")
    given = {name: value.get("default", "") for name, value in ACTION["inputs"].items()} | inputs
    environment = {
        name: given[re.fullmatch(r"\$\{\{ inputs\.([a-z0-9-]+) \}\}", value)[1]] for name, value in step["env"].items()
    }
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    script = folder / "hf-paged"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    environment |= {
        "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CALLED": str(tmp_path / "called.json"),
        "STATUS": str(status),
        "OUTCOME": outcome,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    return done, json.loads((tmp_path / "called.json").read_text()), (tmp_path / "output").read_text()


def test_the_action_passes_its_inputs_on_as_words(tmp_path):
    arguments = "--max-tokens 500 --subset 'two words'\n--column \"it's\""
    done, called, output = run_step(
        tmp_path,
        0,
        "warn",
        model="a model; touch broken",
        config="my gates.toml",
        arguments=arguments,
        report="out put",
    )
    assert done.returncode == 0, done.stderr
    assert called == [
        *("eval", "gate", "--model", "a model; touch broken", "--kv-cache-dtype", "fp8_e4m3", "--report", "out put"),
        *("--config", "my gates.toml", "--max-tokens", "500", "--subset", "two words", "--column", "it's"),
    ]
    assert output == "outcome=warn\n" and (tmp_path / "summary").read_text() == "### a summary\n"
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(("status", "outcome", "exit_code"), [(1, "fail", 1), (2, "error", 2), (3, "inconclusive", 3)])
def test_the_action_ends_as_the_gate_does(tmp_path, status, outcome, exit_code):
    done, called, output = run_step(tmp_path, status, outcome, model="m")
    assert done.returncode == exit_code and output == f"outcome={outcome}\n"
    assert called[-2:] == ["--report", "gate-report"]
    assert (tmp_path / "summary").exists()


def test_an_open_question_may_stay_green_and_nothing_else(tmp_path):
    allowed = {"model": "m", "allow-inconclusive": "true"}
    done, _, output = run_step(tmp_path, 3, "inconclusive", **allowed)
    assert done.returncode == 0 and output == "outcome=inconclusive\n" and "::warning::" in done.stdout
    for status, outcome in ((1, "fail"), (2, "error")):
        assert run_step(tmp_path, status, outcome, **allowed)[0].returncode == status


def test_an_older_report_is_not_taken_for_this_runs(tmp_path):
    run_step(tmp_path, 0, "pass", model="m")
    for name in ("output", "summary"):
        (tmp_path / name).unlink()
    done, _, output = run_step(tmp_path, 9, "", model="m")  # ends before it writes anything
    assert done.returncode == 9 and output == "outcome=error\n" and not (tmp_path / "summary").exists()


def test_the_action_and_the_workflows_know_the_same_inputs():
    known = set(ACTION["inputs"])
    uses = []
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            uses += [step for step in job["steps"] if step.get("uses") == "./"]
    assert uses and all(set(step["with"]) <= known for step in uses)
    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "quality_gate.md").read_text(), re.DOTALL):
        (job,) = yaml.safe_load(text)["jobs"].values()
        steps = [step for step in job["steps"] if "hf_paged" in step.get("uses", "")]
        assert steps and all(set(step["with"]) <= known for step in steps)
    for step in ACTION["runs"]["steps"]:
        assert "uses" in step or step["shell"] == "bash"
        assert "${{" not in step.get("run", "")  # inputs come through the environment alone


def test_the_workflow_asks_for_options_that_there_are():
    import click

    from hf_paged_eval.gate_cli import gate

    app = typer.Typer()
    app.command()(gate)
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "quality_gate.yml").read_text())["jobs"].values()
    rows = job["strategy"]["matrix"]["include"]
    assert len({row["model"] for row in rows}) >= 2
    for row in rows:
        given = [word for word in row["arguments"].split() if word.startswith("--")]
        assert given and set(given) <= options
    assert click.Command  # typer's own parser is click's


# -- pytest plugin ---------------------------------------------------------------------------------


def test_the_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"hf_paged": "hf_paged_eval.pytest_plugin"}


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, hf_paged_eval.pytest_plugin; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "eval"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


PLUGIN_TEST = """
import pytest
import hf_paged_eval.gate_run as gate_run
from gate_helpers import record
from hf_paged_eval.gate import Check, Outcome, Verdict

def fake(model, text, candidate, **settings):
    made = record(harm=0.6 if model == "bad" else 0.05)
    made["seen"] = [candidate, [list(one) for one in text.documents], settings]
    checks = [Check(**(check | {"outcome": Outcome(check["outcome"])})) for check in made["checks"]]
    return gate_run.GateResult(Verdict(tuple(checks)), made)

@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr(gate_run, "run_gate", fake)

@pytest.mark.hf_paged_gate(kv_cache_dtype="int8", max_length=128)
def test_good(hf_paged_gate):
    result = hf_paged_gate("good", documents=[[1, 2, 3]], max_length=64)
    candidate, documents, settings = result.record["seen"]
    assert candidate == {"kv_cache_dtype": "int8"} and documents == [[1, 2, 3]]
    assert settings["max_length"] == 64 and settings["config"] == "some.toml"

def test_bad(hf_paged_gate):
    hf_paged_gate("bad", documents=[[1, 2, 3]])

def test_wrong_use(hf_paged_gate):
    with pytest.raises(pytest.UsageError, match="tokenizer"):
        hf_paged_gate("good")
    with pytest.raises(pytest.UsageError, match="max_tokens"):
        hf_paged_gate("good", documents=[[1, 2]], max_tokens=3)
"""


def test_the_fixture_fails_the_test_on_a_regression(pytester, monkeypatch):
    pytester.makepyfile(PLUGIN_TEST)
    monkeypatch.syspath_prepend(ROOT / "tests")
    plugin = (
        []
        if any(name == "hf_paged" for name, _ in pytester._request.config.pluginmanager.list_name_plugin())
        else [
            "-p",
            "hf_paged_eval.pytest_plugin",
        ]
    )
    ran = pytester.runpytest(
        *plugin, "--strict-markers", "--hf-paged-gate-config", "some.toml", "--hf-paged-gate-report", "out"
    )
    ran.assert_outcomes(passed=2, failed=1)
    ran.stdout.fnmatch_lines(["*perplexity ratio*beyond the fail limit*", "*failed: a regression*"])
    folders = sorted(folder.name for folder in (pytester.path / "out").iterdir())
    assert len(folders) == 2 and all((pytester.path / "out" / one / "report.html").is_file() for one in folders)
