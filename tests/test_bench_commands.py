"""Every bench as a command, small: it runs, its JSON and its plot say what they should. Speed is not tested."""

import datetime
import json

import pytest
from bench_helpers import check_plot
from typer.testing import CliRunner

from hf_paged.cli import app

pytestmark = pytest.mark.demo_model  # for its tokenizer: real text in real tokens

MACHINE = {"processor", "cores", "threads", "memory_gib", "python", "torch", "transformers", "hf_paged", "kernels"}


def bench(name, tmp_path, *arguments, model="tiny"):
    """The record, the plot's text and what was printed."""
    files = tmp_path / "out.json", tmp_path / "out.svg"
    command = ["bench", name, "--quick", "--model", model, "--threads", "1", *arguments]
    ran = CliRunner().invoke(app, [*command, "--json", str(files[0]), "--plot", str(files[1])])
    assert ran.exit_code == 0, ran.output
    record = json.loads(files[0].read_text())
    assert record["bench"] == name and record["setting"]["quick"] and record["setting"]["model"] == model
    about = record["machine"]
    assert MACHINE <= about.keys() and about["threads"] == 1
    assert datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(about["date"]) < datetime.timedelta(1)
    assert about["others_before"] >= 0 and about["others_during"] >= 0
    busy = max(about["others_before"], about["others_during"]) > 0.1
    assert ("do not trust these times" in ran.output) == busy == bool(record["warnings"])
    return record["results"], files[1].read_text(), ran.output


def test_throughput(tmp_path):
    results, plot, output = bench("throughput", tmp_path, "--workload", "mixed", "--workload", "shared_prefix")
    names = ["hf_paged", "padded", "padded_sorted", "generate_batch"]
    assert [work["name"] for work in results["workloads"]] == ["mixed", "shared_prefix"]
    for work in results["workloads"]:
        assert list(work["engines"]) == names and work["reference"] == "padded" and work["requests"] == 6
        for row in work["engines"].values():
            assert row["tokens_per_second"] == pytest.approx(work["new_tokens"] / row["seconds"][0], rel=0.01)
            assert row["peak_mib"] > 100 and row["settings"]
            # Float32 and the same arithmetic: a difference is only allowed where the two best tokens nearly tie.
            assert all(abs(gap) < 1e-3 for gap in row["agreement"]["gaps"])
            assert row["agreement"]["same_requests"] + len(row["agreement"]["gaps"]) == 6
        assert work["engines"]["hf_paged"]["ours_times"] == 1
        assert f"{work['name']}: 6 requests" in output
    check_plot(plot, ["workload", "tokens / s", "MiB", "mixed", "shared_prefix", *names], panels=2)


def test_capacity(tmp_path):
    results, plot, output = bench("capacity", tmp_path, "--block-size", "4")
    ways = ["static", "padded DynamicCache", "paged", "paged + shared prefix", "paged + fp8_e4m3"]
    for work in results["workloads"]:
        assert list(work["ways"]) == ways and work["ways"]["static"]["running_most"] == 2
        for row in work["ways"].values():
            assert row["over_time"][-1][0] == 100 and 0 <= row["waste_mean"] <= row["waste_most"] < 1
            assert 0 < row["held_mean"] <= 1 and row["running_mean"] <= row["running_most"]
    mixed, shared = (work["ways"] for work in results["workloads"])
    # No timing in these: ragged requests waste less and fit more in blocks; shared prefixes fit more again.
    assert mixed["paged"]["waste_mean"] < 0.5 * mixed["static"]["waste_mean"]
    assert mixed["paged"]["running_mean"] > mixed["padded DynamicCache"]["running_mean"]
    assert shared["paged + shared prefix"]["running_most"] > shared["paged"]["running_most"]
    assert mixed["paged + fp8_e4m3"]["running_mean"] > mixed["paged"]["running_mean"]
    check_plot(plot, ["running requests", "waste (% of held KV bytes)", "tokens generated (% of all)"], panels=4)
    assert "mixed: 6 requests in" in output


def test_latency(tmp_path):
    results, plot, _ = bench("latency", tmp_path, "--requests", "8", "--batch-size", "3")
    assert results["batch_size"] == 3 and results["scenarios"]["poisson"]["rate"] > 0
    for scenario in results["scenarios"].values():
        assert list(scenario["ways"]) == ["static batching", "continuous batching"]
        for row in scenario["ways"].values():
            assert (row["all"]["requests"], row["short"]["requests"], row["long"]["requests"]) == (8, 6, 2)
            for kind in ("all", "short", "long"):
                figures = row[kind]
                assert len(figures["completions"]) == figures["requests"]
                for name in ("ttft", "tbt", "completion"):
                    assert 0 < figures[f"{name}_p50"] <= figures[f"{name}_p99"]
                assert figures["ttft_p50"] <= figures["completion_p50"] <= row["all"]["completions"][-1] + 1e-3
    check_plot(plot, ["time from arrival (s)", "completed (%)", "seconds (s)"], panels=4)


def test_scaling(tmp_path):
    results, plot, output = bench("scaling", tmp_path, "--steps", "3")
    assert [row["batch"] for row in results["sweeps"]["batch"]["points"]] == [1, 2, 4, 8]
    assert [row["context"] for row in results["sweeps"]["context"]["points"]] == [32, 64, 128]
    for sweep in results["sweeps"].values():
        assert all(0 < row["ms_least"] <= row["ms"] for row in sweep["points"])
        assert {"intercept", "slope", "r2", "quadratic"} == sweep["fit"].keys()
    check_plot(plot, ["requests in the batch", "context (tokens of each request)", "ms a step"], panels=2)
    assert "us for each request" in output and "us for each token of context" in output


def test_block_size(tmp_path):
    results, plot, output = bench("block-size", tmp_path)
    rows = results["sizes"]
    assert [row["block_size"] for row in rows] == [1, 16, 256]
    assert rows[0]["waste"] == 0 < rows[1]["waste"] < rows[2]["waste"] < 1
    assert rows[0]["table_bytes"] > 5 * rows[1]["table_bytes"] >= 5 * rows[2]["table_bytes"] > 0
    assert all(0.5 < row["hit_share"] < 1 and row["step_ms"] > 0 for row in rows)
    assert results["recommended"] and {row["block_size"] for row in results["recommended"]} <= {1, 16, 256}
    labels = [
        "block size (tokens)",
        "waste (% of held slots)",
        "bytes, all requests",
        "% of prompt tokens",
        "ms a step",
    ]
    check_plot(plot, labels, panels=4)
    assert "GiB: blocks of" in output


def test_roofline(tmp_path):
    results, plot, _ = bench("roofline", tmp_path, "--batch", "2", "--batch", "3")
    assert [row["case"] for row in results["points"]] == ["decode 2", "decode 3", "prefill 32"]
    assert results["weights_covered"] == 1 and results["copy_gb_per_second"] > 0
    for row in results["points"]:
        assert row["step_ms"] > 0 and row["products_ms"] > 0 and row["kv_ms"] > 0 and row["reached"] > 0
    two, three, _ = results["points"]
    assert three["kv_ms"] == pytest.approx(1.5 * two["kv_ms"])
    check_plot(plot, ["step (tokens)", "ms", "floor / step (%)"], panels=2)


def test_profile(tmp_path):
    results, plot, output = bench("profile", tmp_path)
    parts = ["matrix products", "attention", "KV writes", "other operators", "Python and dispatch"]
    parts += ["sampling", "scheduling", "outputs and callbacks"]
    shares = results["shares"]
    assert list(shares) == parts and sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for name, share in shares.items() if name != "Python and dispatch")
    assert shares["Python and dispatch"] > -1e-9
    assert sum(results["seconds_of"].values()) == pytest.approx(results["seconds"])
    assert 1 < results["profiled_steps"] < results["steps"] == results["workload"]["longest_output"]
    check_plot(plot, ["% of the run", "workload", *parts], panels=1)
    assert f"{results['profiled_steps']} steps under the profiler" in output


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    for arguments, message in (
        (["latency", "--rate", "-1"], "rate > 0; got 8, 16, -1.0"),
        (["throughput", "--workload", "nothing"], "workload must be one of mixed"),
        (["throughput", "--engine", "nothing"], "unknown engine 'nothing'; there are hf_paged, padded"),
        (["throughput", "--peer-python", "x=y"], "expected NAME=INTERPRETER with NAME of vllm, openvino, got 'x=y'"),
        (["capacity", "--slots", "0"], "slots must be at least 1, got 0"),
        (["scaling", "--batch", "1"], "a fit needs three points of each sweep, got batches [1]"),
        (["scaling", "--context", "1", "--context", "2", "--context", "9000"], "9000 is beyond the model's 8192"),
        (["roofline", "--dtype", "int8"], "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (["roofline", "--json", str(tmp_path / "no" / "where")], "there is no folder"),
    ):
        ran = CliRunner().invoke(app, ["bench", *arguments, "--quick", "--model", "tiny"])
        assert ran.exit_code == 1 and message in ran.output.replace("\n", " "), ran.output
        assert "Traceback" not in ran.output


def test_the_benches_are_listed_and_wrong_usage_is_status_2():
    listed = CliRunner().invoke(app, ["bench", "--help"])
    assert listed.exit_code == 0
    for name in ("throughput", "capacity", "latency", "scaling", "block-size", "roofline", "profile"):
        assert name in listed.output
    assert CliRunner().invoke(app, ["bench", "nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "scaling", "--steps", "0"]).exit_code == 2
