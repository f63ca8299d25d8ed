"""`hf-paged eval gate` and `sweep` on a small model that is trained here: statuses, reports, stored baselines."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_paged.cli import app
from hf_paged_eval import small_model
from hf_paged_eval.quant_error import measure_cache

WINDOWS = ["--max-length", "256", "--stride", "128", "--quiet"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a model that has learned a little."""
    folder = tmp_path_factory.mktemp("models") / "hf-paged-small"
    loss = small_model.train_small_model(folder, steps=80)
    assert 3.0 < loss < 5.0  # even odds over its 512 tokens are 6.24
    return folder


def hf_paged(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def gate(small, tmp_path, *arguments, tokens=1500):
    """Exit status, record and what was printed."""
    report = tmp_path / "report"
    ran = hf_paged("gate", "--model", small, "--max-tokens", tokens, "--report", report, *WINDOWS, *arguments)
    record = json.loads((report / "report.json").read_text())
    assert record["exit_code"] == ran.exit_code, ran.output
    return ran.exit_code, record, ran.output


def config(tmp_path, text):
    file = tmp_path / "gates.toml"
    file.write_text(text)
    return ["--config", file]


def test_pass(small, tmp_path):
    status, record, output = gate(small, tmp_path)
    assert status == 0 and record["outcome"] in ("pass", "warn") and "hf-paged-small, fp8_e4m3 per_token_head" in output
    assert record["limits"]["source"] == "built-in gates.toml [models.small.fp8_e4m3]"
    assert record["num_tokens"] == 1500 and record["settings"]["max_length"] == 256
    assert sorted(file.name for file in (tmp_path / "report").iterdir()) == [
        *("junit.xml", "report.html", "report.json", "summary.md")
    ]
    assert "BOS none" in output and str(small.parent) not in json.dumps(record)
    assert [layer["layer"] for layer in record["cache"]["layers"]] == [0, 1, 2]
    # 2 KV heads of 24, keys and values, 3 layers: a byte each and two scales, against four bytes each
    assert record["cache"]["bytes_per_token"] == 3 * 2 * (2 * 24 + 2 * 4)
    assert record["cache"]["baseline_bytes_per_token"] == 3 * 2 * 2 * 24 * 4
    assert sum(row["share"] for row in record["kl_histogram"]) == pytest.approx(1)
    assert 1400 < sum(row["num_tokens"] for row in record["by_position"]) <= 1500  # ranges of a few tokens are left out


def test_the_models_own_dtype_changes_nothing(small, tmp_path):
    status, record, _ = gate(small, tmp_path, "--kv-cache-dtype", "auto", tokens=600)
    overall = record["summary"]["overall"]
    assert status == 0 and overall["ratio"] == 1 and overall["kl_max"] == 0 and overall["top1"] == 1


def test_fail(small, tmp_path):
    format_ = ["--kv-cache-dtype", "fp8_e5m2"]
    mean = gate(small, tmp_path, *format_)[1]["summary"]["overall"]["kl_mean"]
    tight = config(tmp_path, f"[default]\nmin_tokens = 100\nmean_kld = {{ fail = {mean / 10} }}\n")
    status, record, output = gate(small, tmp_path, *format_, *tight)
    assert status == 1, record["checks"]
    assert "failed: a regression" in output and "beyond the fail limit" in output
    assert {check["metric"]: check["outcome"] for check in record["checks"]}["mean_kld"] == "fail"


def test_inconclusive(small, tmp_path):
    status, record, output = gate(small, tmp_path, tokens=400)  # min_tokens is 500
    assert status == 3 and record["more_tokens"] == 100 and "needs about 100 more tokens" in output
    mean = gate(small, tmp_path)[1]["summary"]["overall"]["kl_mean"]
    on_it = config(tmp_path, f"[default]\nmin_tokens = 100\nmean_kld = {{ fail = {mean * 1.001} }}\n")
    status, record, output = gate(small, tmp_path, *on_it)
    assert status == 3 and ("more tokens" in output or "cannot be decided" in output)


def test_a_bucket_without_tokens_is_not_measured(small, tmp_path):
    bucket = config(tmp_path, "[models.hf-paged-small.buckets.4k-8k]\nratio = { fail = 1.01 }\n")
    status, record, output = gate(small, tmp_path, *bucket)
    assert status == 3 and "not measured" in output
    assert record["summary"]["buckets"]["4k-8k"] is None and record["summary"]["buckets"]["0-512"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "fp7"], "fp7"),
        (["--kv-cache-dtype", "k:int8,v:"], "kv_cache_dtype"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--skip-layers", "some"], "--skip-layers"),
        (["--skip-layers", "7"], "skip_layers names layer 7"),
        (["--kv-scale-granularity", "per_head"], "calibrate_kv_scales"),
        (["--path", "nowhere.txt"], "nowhere.txt"),
        (["--max-length", "8", "--stride", "9"], "stride"),
        (["--baselines", "nowhere"], "nowhere"),
        (["--update-baseline"], "baselines must be a folder"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_could_not_run(small, tmp_path, arguments, message):
    status, record, output = gate(small, tmp_path, *arguments)
    assert status == 2 and record["outcome"] == "error"
    assert message in record["error"] and message in output and "could not run" in output
    assert "error" in (tmp_path / "report" / "junit.xml").read_text()


def test_no_such_model(tmp_path):
    status, record, _ = gate(tmp_path / "nowhere", tmp_path)
    assert status == 2 and record["model"]["name"] == "nowhere"


@pytest.mark.parametrize("error", [KeyError("boom"), AssertionError("boom"), KeyboardInterrupt(), MemoryError()])
def test_a_crash_is_no_regression(small, tmp_path, monkeypatch, error):
    def broken(*args, **options):
        raise error

    monkeypatch.setattr("hf_paged_eval.gate_run.score", broken)
    assert gate(small, tmp_path)[0] == 2


def test_stored_baselines(small, tmp_path):
    store = ["--baselines", tmp_path / "stored"]
    (tmp_path / "stored").mkdir()
    status, record, output = gate(small, tmp_path, *store)
    assert status == 0 and record["baseline"]["stored"] is None and "no stored baseline" in output
    status, record, output = gate(small, tmp_path, *store, "--update-baseline")
    (file,) = (tmp_path / "stored").iterdir()
    assert status == 0 and file.name in output and str(tmp_path) not in file.read_text()
    status, record, _ = gate(small, tmp_path, *store)
    drift = next(check for check in record["checks"] if check["metric"] == "drift")
    assert status == 0 and drift["outcome"] == "pass" and drift["value"] < 1e-5
    # Other settings are another baseline's, not a wrong one.
    assert "no stored baseline" in gate(small, tmp_path, *store, "--max-length", "128")[2]
    # Other weights by the same name are refused before anything is scored, and by a named file just so.
    other = tmp_path / "other" / small.name
    shutil.copytree(small, other)
    model = AutoModelForCausalLM.from_pretrained(small)
    with torch.no_grad():
        model.model.norm.weight *= 1.5
    model.save_pretrained(other)
    for place in (store, ["--baselines", file]):
        status, record, _ = gate(other, tmp_path, *place)
        assert status == 2 and "foreign: of other weights" in record["error"] and "--update-baseline" in record["error"]
    # A number that has moved is a regression though candidate and baseline agree.
    raw = json.loads(file.read_text())
    raw["nll_sum"] *= 1.001
    raw["perplexity"] = float(torch.tensor(raw["nll_sum"] / raw["num_tokens"], dtype=torch.float64).exp())
    file.write_text(json.dumps(raw))
    status, record, output = gate(small, tmp_path, *store)
    assert status == 1 and "stored is" in output


def test_sweep(small, tmp_path):
    report = tmp_path / "report"
    formats = ["--kv-cache-dtype", "fp8_e5m2", "--kv-cache-dtype", "int8"]
    granularities = ["--kv-scale-granularity", "per_token_head", "--kv-scale-granularity", "per_head"]
    skips = ["--skip-layers", "none", "--skip-layers", "worst:1"]
    ran = hf_paged(
        *("sweep", "--model", small, "--max-tokens", "600", "--report", report),
        *(*WINDOWS, *formats, *granularities, *skips),
    )
    record = json.loads((report / "sweep.json").read_text())
    assert ran.exit_code == record["exit_code"] == 0, ran.output
    assert len(record["rows"]) == 8 and all(row["error"] is None for row in record["rows"]), ran.output
    assert len(list((report / "scales").iterdir())) == 2
    sizes = {row["name"]: row["bytes_per_token"] for row in record["rows"]}
    assert sizes["int8 per_head"] == 3 * 2 * 48 < sizes["int8 per_token_head"] == 3 * 2 * 56
    chosen = next(row for row in record["rows"] if row["number"] == record["recommended"])
    passing = [row["bytes_per_token"] for row in record["rows"] if row["outcome"] in ("pass", "warn")]
    assert chosen["bytes_per_token"] == min(passing)
    assert f"Recommended: {chosen['name']}" in ran.output and (report / "sweep.html").exists()


def test_a_sweep_that_cannot_run(small, tmp_path):
    for wrong in (["--kv-cache-dtype", "fp7"], ["--skip-layers", "worst"], ["--model", tmp_path / "nowhere"]):
        ran = hf_paged("sweep", "--model", small, "--report", tmp_path / "report", *WINDOWS, *wrong)
        assert ran.exit_code == 2 and "could not run" in ran.output


def test_errors_by_layer_are_those_of_the_format(small):
    model = AutoModelForCausalLM.from_pretrained(small)
    documents = [list(range(3, 200)), [5, 6, 7]]
    exact = measure_cache(model, documents, {"block_size": 16})
    assert exact.num_tokens == 192 and all(layer.key == layer.value == 0 for layer in exact.layers)
    worst = {}
    for dtype, low, high in (("int8", 1e-3, 1e-2), ("fp8_e4m3", 1e-2, 4e-2), ("fp8_e5m2", 2e-2, 8e-2)):
        found = measure_cache(model, documents, {"kv_cache_dtype": dtype, "skip_layers": (1,)})
        assert found.layers[1].key == found.layers[1].value == 0
        assert all(low < error < high for layer in found.layers[::2] for error in (layer.key, layer.value)), found
        worst[dtype] = found.worst(1)
        assert 1 not in found.worst(2) and found.worst(2) == (0, 2)
    with pytest.raises(ValueError, match="no document"):
        measure_cache(model, [[]], None)


def test_training_again_gives_the_same_model(tmp_path):
    texts = small_model.help_texts()[:12]
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        state = torch.get_rng_state()
        small_model.train_small_model(tmp_path / name, steps=2, seed=seed, texts=texts)
        assert torch.equal(torch.get_rng_state(), state)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not all(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])
    text = "Naïve text, 日本\n\n  def f(x):"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    with pytest.raises(ValueError, match="exists already"):
        small_model.train_small_model(tmp_path / "a", steps=2)
    with pytest.raises(ValueError, match="a window needs more"):
        small_model.train_small_model(tmp_path / "d", steps=2, texts=["short"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "c"]
