"""The operators' front: argument errors by name, the choice of a backend, the counts of calls."""

import ast
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_paged_kernels as kernels


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
    ("reshape_and_cache", "key_cache", torch.zeros(3, 2, 4, 6, dtype=torch.int8), "int8"),
    ("copy_blocks", "key_cache", torch.randn(3, 2, 6, 4).mT, "strides (48, 24, 1, 4)"),
    ("copy_blocks", "value_cache", torch.randn(3, 2, 4, 0), "[3, 2, 4, 0]"),
    ("copy_blocks", "value_cache", torch.randn(3, 1, 4, 5), "[3, 1, 4, 5]"),
    ("copy_blocks", "pairs", torch.zeros(1, 3, dtype=torch.int64), "[1, 3]"),
    ("copy_blocks", "pairs", [[0, 1]], "[[0, 1]]"),
    ("paged_decode", "query", torch.randn(3, 4, 6), "[3, 4, 6]"),
    ("paged_decode", "max_seq_len", -1, "-1"),
    ("paged_decode", "seq_lens", torch.tensor([9, 3], dtype=int32), "9"),
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
    """A second backend, which answers every operator with its own name."""
    functions = {op: lambda *args, **options: "fake" for op in kernels.OPS}
    monkeypatch.setitem(kernels.BACKENDS, "fake", SimpleNamespace(**functions))


def test_backend_overrides_the_choice_and_puts_it_back(fake):
    assert isinstance(call("paged_decode"), torch.Tensor)
    with kernels.backend("fake"):
        assert call("paged_decode") == call("paged_prefill") == "fake"
        with kernels.backend("reference"):
            assert isinstance(call("paged_prefill"), torch.Tensor)
        assert call("paged_decode") == "fake"
    with pytest.raises(KeyError), kernels.backend("fake"):
        raise KeyError
    assert isinstance(call("paged_decode"), torch.Tensor)


def test_an_unknown_backend_is_refused_at_once(fake):
    with pytest.raises(ValueError, match=r"backend: expected one of \['fake', 'reference'\], got 'cuda'"):
        kernels.backend("cuda")


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
    assert seen["fake"] == "fake" and isinstance(seen["reference"], torch.Tensor)


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


def test_describe_says_what_runs_and_why(fake):
    assert "known backends: fake, reference" in kernels.describe()
    assert "cpu: reference for float32, bfloat16, float16, float64 (plain torch" in kernels.describe()
    with kernels.backend("fake"):
        assert "cpu: fake for float32, bfloat16, float16, float64 (forced by" in kernels.describe()


def test_the_operators_import_torch_and_the_standard_library_only():
    allowed = {"torch", "triton", "hf_paged_kernels"} | sys.stdlib_module_names
    for file in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, file
