"""The benches run, compare like with like and write down what they measured; how fast anything is, is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_paged_kernels as kernels

BENCHMARKS = Path(__file__).resolve().parent.parent / "kernels" / "benchmarks"
BACKENDS = [name for name in kernels.BACKENDS if name != "triton"]
BRIEF = ["--quick", "--seconds", "0", "--threads", "1"]


def bench(name, *arguments):
    command = [sys.executable, str(BENCHMARKS / name), *BRIEF, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize(
    "name, peers, cases",
    [
        ("bench_attention.py", ["gather", "contiguous"], ["1 x 128", "8 x 128", "64 over 0", "64 over 64"]),
        ("bench_writes.py", ["index", "copy"], ["1 tokens", "64 tokens", "4 blocks"]),
    ],
)
def test_a_bench_writes_ratios_of_every_case(tmp_path, name, peers, cases):
    ran = bench(name, "--json", str(tmp_path / "out.json"), "--backends", *BACKENDS)
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    about, rows = document["machine"], document["results"]
    assert {"processor", "cores", "threads", "torch", "date", "kernels", "others_during"} <= about.keys()
    assert about["bandwidth"]["copy"] > 0 and about["bandwidth"]["read"] > 0 and about["threads"] == 1
    wanted = [(backend, dtype, case) for dtype in ("float32", "bfloat16") for case in cases for backend in BACKENDS]
    assert [(row["backend"], row["dtype"], row["case"]) for row in rows] == wanted
    for row in rows:
        assert row["us"] > 0 and row["rounds"] >= 5
        for peer in peers:
            assert row[f"{peer}_us"] > 0 and row[f"times_{peer}"] > 0
    for case in cases:
        assert ran.stdout.count(f" {case} ") >= 2 * len(BACKENDS), ran.stdout
    assert "memory: copy" in ran.stdout and f"measuring 1 of {2 * len(cases)}: " in ran.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backends", "triton"], "--backends: expected some of ['reference'"),
        (["--dtypes", "int8"], "--dtypes: expected float32, bfloat16 or float16, got int8"),
        (["--contexts", "100"], "multiples of the block size 16, got 99 + 1"),
    ],
)
def test_a_wrong_option_is_named(monkeypatch, arguments, message):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from bench_attention import main

    with pytest.raises(SystemExit) as error:
        main(["--quick", *arguments])
    assert message in str(error.value)


def test_cases_too_large_are_left_out_by_name(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import measure

    case = SimpleNamespace(op="paged_decode", name="8 x 128", dtype="float32", bytes_needed=3 * measure.GIB)
    assert measure.fits(case, 3.0) and not capsys.readouterr().out
    assert not measure.fits(case, 2.5)
    assert "left out: paged_decode 8 x 128, float32: needs 3.0 GiB, --max-gib is 2.5" in capsys.readouterr().out


def test_times_are_taken_in_turns(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import measure

    clock, order = [0.0], []

    def contender(name, seconds):
        def run():
            order.append(name)
            clock[0] += seconds[len(order) > 6]  # the machine becomes three times as slow

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    times = measure.in_turns({"ours": contender("ours", (1, 3)), "peer": contender("peer", (2, 6))}, seconds=0, least=4)
    assert order == ["ours", "peer"] + ["ours", "peer", "peer", "ours"] * 2
    assert times.rounds == {"ours": [1, 1, 3, 3], "peer": [2, 2, 6, 6]}
    assert times.ratio("peer", "ours") == 2 and times.median("ours") == 2
    assert measure.fastest({"slow": contender("slow", (9, 9)), "fast": contender("fast", (1, 1))}, 0) == "fast"


def test_layers_go_beyond_the_caches_within_bounds(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from measure import GIB, MIB, layers_of

    assert layers_of(MIB // 4, MIB, 4 * GIB) == 30
    assert layers_of(50 * MIB, 150 * MIB, 4 * GIB) == 4
    assert layers_of(900 * MIB, 2700 * MIB, 4 * GIB) == 1
    assert layers_of(50 * MIB, 150 * MIB, 301 * MIB) == 2


@pytest.mark.parametrize("group", [1, 3])
def test_every_way_of_a_peer_is_right(monkeypatch, group):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from dense_peers import decode_ways, prefill_ways

    k, v = torch.randn(2, 2, 2, 24, 8).unbind(0)
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for queries in (1, 5, 24):
        q = torch.randn(2, 2 * group, queries, 8)
        scores = (q @ wide_k.mT) * 8**-0.5
        hidden = torch.ones(queries, 24, dtype=torch.bool).triu(24 - queries + 1)
        want = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ wide_v
        ways = prefill_ways(group, queries, 24, torch.float32)
        assert len(ways) == (1 if queries == 24 else 3) * (2 if group > 1 else 1)
        for way in ways.values():
            torch.testing.assert_close(way(q, k, v), want)
        for way in decode_ways(group).values() if queries == 1 else ():
            torch.testing.assert_close(way(q[:, :, 0], k, v), want[:, :, 0])
