"""The operators' front: argument errors by name, the choice of a backend, the counts of calls."""

import ast
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_paged_kernels as kernels
from hf_paged_kernels import dispatch


def arguments():
    """Valid arguments of every operator, by name: 2 sequences, 4 heads over 2 KV heads, Dk 6, Dv 5."""
    return dict(
        query=torch.randn(2, 4, 6),
        key=torch.randn(2, 2, 6),
        value=torch.randn(2, 2, 5),
        key_cache=torch.randn(3, 2, 4, 6),
        value_cache=torch.randn(3, 2, 4, 5),
        block_tables=torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
        seq_lens=torch.tensor([7, 3], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        slot_mapping=torch.tensor([9, 5]),
        pairs=torch.tensor([[0, 1]]),
    )


CACHES = ("key_cache", "value_cache")
NEEDS = {
    "reshape_and_cache": ("key", "value", *CACHES, "slot_mapping"),
    "paged_decode": ("query", *CACHES, "block_tables", "seq_lens"),
    "paged_prefill": ("query", *CACHES, "block_tables", "query_start_loc", "seq_lens"),
    "copy_blocks": (*CACHES, "pairs"),
}
ATTENTION = ("paged_decode", "paged_prefill")


def call(op, **changes):
    values = arguments() | changes
    options = {name: value for name, value in changes.items() if name not in arguments()}
    if op in ATTENTION:
        options.setdefault("scale", 0.5)
    return getattr(kernels, op)(*(values[name] for name in NEEDS[op]), **options)


int32, meta = torch.int32, torch.device("meta")
WRONG = [
    ("reshape_and_cache", "key", torch.randn(3, 2, 6), "[3, 2, 6]"),
    ("reshape_and_cache", "key", torch.randn(2, 2, 6).half(), "float16"),
    ("reshape_and_cache", "value", torch.randn(2, 2, 6), "[2, 2, 6]"),
    ("reshape_and_cache", "value", torch.randn(2, 2, 5, device=meta), "meta"),
    ("reshape_and_cache", "slot_mapping", torch.zeros(2, dtype=int32), "int32"),
    ("reshape_and_cache", "key_cache", torch.zeros(3, 2, 4, 6, dtype=torch.int16), "int16"),
    ("copy_blocks", "key_cache", torch.randn(3, 2, 6, 4).mT, "strides (48, 24, 1, 4)"),
    ("copy_blocks", "value_cache", torch.randn(3, 2, 4, 0), "[3, 2, 4, 0]"),
    ("copy_blocks", "value_cache", torch.randn(3, 1, 4, 5), "[3, 1, 4, 5]"),
    ("copy_blocks", "pairs", torch.zeros(1, 3, dtype=torch.int64), "[1, 3]"),
    ("copy_blocks", "pairs", [[0, 1]], "[[0, 1]]"),
    ("paged_decode", "query", torch.randn(3, 4, 6), "[3, 4, 6]"),
    ("paged_decode", "max_seq_len", -1, "-1"),
    ("paged_decode", "seq_lens", torch.tensor([9, 3], dtype=int32), "9"),
    ("paged_decode", "block_tables", torch.tensor([[2, -1], [1, -1]], dtype=int32), "-1 in entry 1 of sequence 0"),
    ("paged_prefill", "query_start_loc", torch.zeros(2, dtype=int32), "[2]"),
    ("paged_prefill", "query_start_loc", torch.tensor([0, 2, 1], dtype=int32), "[0, 2, 1]"),
    ("paged_prefill", "query_start_loc", torch.tensor([0, 1, 9], dtype=int32), "[0, 1, 9]"),
    ("paged_prefill", "seq_lens", torch.tensor([9, 3], dtype=int32), "9"),
    ("paged_prefill", "max_query_len", 1.5, "1.5"),
]
WRONG += [
    (op, name, value, shown)
    for op in ATTENTION
    for name, value, shown in [
        ("query", torch.randn(2, 3, 6), "3"),
        ("query", torch.randn(2, 4, 5), "[2, 4, 5]"),
        ("block_tables", torch.zeros(2, 2, dtype=torch.int64), "int64"),
        ("seq_lens", torch.zeros(1, dtype=int32), "[1]"),
        ("seq_starts", torch.zeros(3, dtype=int32), "[3]"),
        ("sinks", torch.zeros(2), "[2]"),
        ("sinks", torch.zeros(4, dtype=int32), "int32"),
        ("scale", None, "None"),
        ("softcap", -1.0, "-1.0"),
        ("sliding_window", None, "None"),
    ]
]


@pytest.mark.parametrize("op, name, value, shown", WRONG)
def test_a_wrong_argument_is_named_with_its_value(op, name, value, shown):
    with pytest.raises(ValueError) as error:
        call(op, **{name: value})
    assert str(error.value).startswith(f"{name}: expected ") and shown in str(error.value).split(" got ")[1]


def test_counts_say_which_operators_ran():
    kernels.reset_op_calls()
    assert kernels.op_calls() == dict.fromkeys(kernels.OPS, 0)
    for times, op in enumerate(kernels.OPS, start=1):
        for _ in range(times):
            call(op)
    with pytest.raises(ValueError):
        call("copy_blocks", pairs=torch.zeros(1))  # refused, hence not run
    counts = kernels.op_calls()
    assert counts == {"reshape_and_cache": 1, "paged_decode": 2, "paged_prefill": 3, "copy_blocks": 4}
    counts["copy_blocks"] = 0  # a copy
    assert kernels.op_calls()["copy_blocks"] == 4
    kernels.reset_op_calls()
    assert not any(kernels.op_calls().values())


@pytest.fixture
def fake(monkeypatch):
    """One backend more, whose attention is 7 everywhere and which writes nothing."""
    functions = {op: lambda query, *args, **options: torch.full((2, 4, 5), 7.0) for op in ATTENTION}
    functions |= {op: lambda *args: None for op in kernels.OPS if op not in ATTENTION}
    monkeypatch.setitem(kernels.BACKENDS, "fake", SimpleNamespace(**functions))


def is_fake(result):
    return bool((result == 7).all())


def test_backend_overrides_the_choice_and_puts_it_back(fake):
    assert not is_fake(call("paged_decode"))
    with kernels.backend("fake"):
        assert is_fake(call("paged_decode")) and is_fake(call("paged_prefill"))
        with kernels.backend("reference"):
            assert not is_fake(call("paged_prefill"))
        assert is_fake(call("paged_decode"))
    with pytest.raises(KeyError), kernels.backend("fake"):
        raise KeyError
    assert not is_fake(call("paged_decode"))


def test_an_unknown_backend_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {"reference": None})
    monkeypatch.setattr(dispatch, "MISSING", {"c": "not built"})
    with pytest.raises(ValueError, match=r"backend: expected one of \['reference'\], got 'cuda'"):
        kernels.backend("cuda")
    with pytest.raises(ValueError, match=r"got 'c' \(not built\)"):
        kernels.backend("c")


def test_backend_holds_in_its_own_thread_only(fake):
    meet, seen = threading.Barrier(2, timeout=30), {}

    def work(name):
        with kernels.backend(name):
            meet.wait()  # both are inside now
            seen[name] = call("paged_decode")
            meet.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("fake", "reference")]
    with kernels.backend("fake"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert is_fake(seen["fake"]) and not is_fake(seen["reference"])


def test_counts_miss_no_call_of_any_thread(fake):
    def work():
        with kernels.backend("fake"):
            for _ in range(200):
                call("copy_blocks")

    kernels.reset_op_calls()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernels.op_calls()["copy_blocks"] == 800


def test_the_choice_by_device_dtype_and_head_size(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", dict.fromkeys(("reference", "c", "triton")))
    cpu, cuda, mps = (torch.device(name) for name in ("cpu", "cuda", "mps"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.choose(cpu, dtype, 576)[0] == "c"
        assert kernels.choose(cuda, dtype, 256)[0] == "triton"
        assert kernels.choose(cuda, dtype, 257)[0] == "reference"
        assert kernels.choose(mps, dtype, 64)[0] == "reference"
    for device in (cpu, cuda):
        assert kernels.choose(device, torch.float64, 64) == (
            "reference",
            "plain torch: the kernels accumulate in float32",
        )
    monkeypatch.setattr(dispatch, "BACKENDS", {"reference": None})
    monkeypatch.setattr(dispatch, "MISSING", {"c": "not built", "triton": "not installed"})
    assert kernels.choose(cpu, torch.float32, 64) == ("reference", "plain torch: not built")
    assert kernels.choose(cuda, torch.float32, 64) == ("reference", "plain torch: not installed")


def test_describe_says_what_runs_and_why(fake, monkeypatch):
    assert "known backends: " in kernels.describe() and "fake, reference" in kernels.describe()
    assert "cpu: reference for float64 (plain torch: the kernels accumulate in float32)" in kernels.describe()
    with kernels.backend("fake"):
        assert "cpu: fake for float32, bfloat16, float16, float64 (forced by" in kernels.describe()
    monkeypatch.setitem(dispatch.MISSING, "other", "no compiler")
    assert "not here: other (no compiler)" in kernels.describe()


def test_the_operators_import_torch_and_the_standard_library_only():
    allowed = {"torch", "triton", "hf_paged_kernels"} | sys.stdlib_module_names
    for file in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, file
