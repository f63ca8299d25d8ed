"""What only the C backend promises: every instruction set, any number of threads, bounded scratch, checked ids,
and an installation that goes on without it."""

import logging
import subprocess
import sys
import threading

import pytest
import torch
from kernel_cases import build, check

import hf_paged_kernels as kernels
from hf_paged_kernels import cpu, dispatch

pytestmark = pytest.mark.skipif("c" not in kernels.BACKENDS, reason="the C extension was not built here")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def problems(dtype):
    """Decode and prefill calls that reach both kernels, split rows, odd sizes and every feature."""
    everything = dict(window=37, softcap=3.0, sinks=True, starts=[5, 0, 40], lse=True, dtype=dtype)
    yield build([1100, 3, 600], head_dim=80, head_dim_v=24, block_size=17, group=3, dtype=dtype, lse=True)
    yield build([70, 0, 64], head_dim=8, block_size=1, group=8, **everything)
    yield build([700, 130, 40], head_dim=64, block_size=16, group=16, kv_heads=1, dtype=dtype, sinks=True)
    yield build([130, 9, 70], [64, 9, 33], head_dim=24, block_size=16, group=3, dtype=dtype)
    yield build([66, 0, 70], [66, 0, 5], head_dim=96, head_dim_v=40, block_size=4, group=1, **everything)
    yield build([90, 7], [40, 1], head_dim=128, block_size=64, group=5, dtype=dtype, lse=True)
    yield build([5, 77], head_dim=64, dtype=dtype, scale=-0.2)  # what pads a vector must not win the maximum


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cpu.instruction_sets())
def test_every_instruction_set_of_this_processor(instruction_set, name, dtype):
    assert instruction_set(name) == name
    for case in problems(dtype):
        check(case, "c")


def test_an_unknown_instruction_set_is_refused():
    assert cpu.instruction_sets()[-1] == "baseline" or "neon" in cpu.instruction_sets()
    with pytest.raises(ValueError, match="instruction set: expected one of .*'baseline'.*, got 'mmx'"):
        cpu.use_instruction_set("mmx")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_does_not_depend_on_the_threads(threads, dtype):
    for case in problems(dtype):
        results = []
        for count in (1, 2, 3, 5):
            threads(count)
            results.append(case.run("c", return_lse=True))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_many_threads_of_python_at_once(threads):
    threads(2)
    cases = list(problems(torch.float32))
    expected = [case.run("c") for case in cases]
    wrong = []

    def work(number):
        for _ in range(10):
            case, (out, _) = cases[number], expected[number]
            if not torch.equal(case.run("c")[0], out):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n % len(cases),)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_conversions_are_torchs(instruction_set):
    """One position has weight 1, so decode hands out what it stored: every finite code, denormals and -0 included."""
    for name in cpu.instruction_sets():
        instruction_set(name)
        for dtype in (torch.bfloat16, torch.float16):
            codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
            codes = torch.where(codes.isfinite(), codes, 0).view(-1, 1, 64)
            key = torch.zeros_like(codes)
            table = torch.arange(len(codes), dtype=torch.int32)[:, None]
            lens = torch.ones(len(codes), dtype=torch.int32)
            with kernels.backend("c"):
                out = kernels.paged_decode(key, key[:, None], codes[:, None], table, lens, scale=1.0)
            assert torch.equal(out, codes)


def test_scratch_is_bounded_by_the_head_sizes_alone():
    """Less than one layer of one sequence of 2,048 tokens, whatever the lengths are."""

    def scratch(head_dim, num_tokens, max_blocks):
        fields = [0] * 17 + [num_tokens, 1, 32, 8, head_dim, head_dim, 10**6, 16, max_blocks, 0, 0, 0, 0, 0]
        return cpu.load()[0].hf_paged_scratch_bytes(cpu._ATTENTION.pack(*fields, 1.0, 0.0, 8))

    for head_dim in (64, 128, 256):
        assert scratch(head_dim, 1, 1) == scratch(head_dim, 10**5, 10**6) < 2048 * 2 * head_dim * 4
    assert scratch(64, 1, 1) == 4 * (64 * 96 * 2 + 64 * 96 + 64 * 128 + 5 * 96)


BAD_ENTRIES = [(-1, "got -1 in entry 1 of sequence 0"), (3, "got 3 in entry 1 of sequence 0")]


@pytest.mark.parametrize("entry, message", BAD_ENTRIES)
def test_a_table_that_leads_outside_the_pool_is_refused(entry, message):
    pool = torch.randn(3, 1, 4, 8)
    table, lens = torch.tensor([[0, entry]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
    with kernels.backend("c"):
        with pytest.raises(ValueError, match=f"block_tables: expected a block in 0..2, {message}"):
            kernels.paged_decode(torch.randn(1, 1, 8), pool, pool, table, lens, scale=1.0)
        with pytest.raises(ValueError, match=message):
            kernels.paged_prefill(torch.randn(1, 1, 8), pool, pool, table, query_start_loc, lens, scale=1.0)


def test_slots_and_pairs_outside_the_pool_are_refused_before_anything_is_written():
    pool = torch.zeros(3, 1, 4, 8)
    rows = torch.ones(2, 1, 8)
    with kernels.backend("c"):
        with pytest.raises(ValueError, match="slot_mapping: expected at most 11, got 12 in row 1"):
            kernels.reshape_and_cache(rows, rows, pool, pool.clone(), torch.tensor([0, 12]))
        for pairs in ([[0, 1], [1, 3]], [[0, 1], [-1, 2]]):
            with pytest.raises(ValueError, match="pairs: expected blocks in 0..2, got .* in row 1"):
                kernels.copy_blocks(pool + 1, pool, torch.tensor(pairs))
    assert not pool.any()


@pytest.mark.parametrize("value", [0.1, 1.0])
def test_sums_over_long_contexts_keep_the_bound(value):
    """Values of one sign: one running sum over all positions would drift."""
    case = build([8192], [64], head_dim=64, kv_heads=1, group=4, block_size=16, scale=5 / 8, seed=1)
    finite = case.value_cache.isfinite()
    case.value_cache[finite] = value + 0.1 * case.value_cache[finite] * (value == 1.0)
    check(case, "c")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sink_that_is_no_number_shows(value):
    case = build([9, 4], sinks=True)
    case.options["sinks"] = torch.full_like(case.options["sinks"], value)
    assert case.run("c")[0].isnan().all() and case.run("reference")[0].isnan().all()


def test_plain_decode_is_the_same_attention_and_leaves_the_rest_to_the_checks():
    case = build([70, 0, 64], head_dim=24, head_dim_v=24, block_size=16)
    table, lens = (tensor.contiguous() for tensor in case.index)
    tensors = (case.query.contiguous(), case.key_cache, case.value_cache, table, lens)
    plain = (0.3, 5, 2.0, None)
    with kernels.backend("reference"):
        want = kernels.paged_decode(*tensors, scale=0.3, sliding_window=5, softcap=2.0)
    kernels.reset_op_calls()
    torch.testing.assert_close(cpu.plain_decode(*tensors, *plain), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernels.paged_decode(*tensors, scale=0.3, sliding_window=5, softcap=2.0), want)
    assert kernels.op_calls()["paged_decode"] == 1
    odd = [tensor.double() if tensor.is_floating_point() else tensor.long() for tensor in tensors]
    odd += [tensor.to("meta") for tensor in tensors] + [torch.cat([tensor, tensor]) for tensor in tensors]
    for index, instead in zip([*range(5)] * 3, odd, strict=True):
        if index == 1 and instead.shape[0] > case.key_cache.shape[0]:
            continue  # more blocks of K than of V: told by V's turn
        others = [*tensors[:index], instead, *tensors[index + 1 :]]
        assert cpu.plain_decode(*others, *plain) is None, f"argument {index}: {instead.dtype} {instead.shape}"
        with pytest.raises(ValueError):
            kernels.paged_decode(*others, scale=0.3)
    for wrong in (
        (0.3, -1, 2.0, None),
        (0.3, 5, -1.0, None),
        (0.3, 5, "2", None),
        (0.3, 5, 2.0, -3),
        ("1", 5, 2.0, None),
    ):
        assert cpu.plain_decode(*tensors, *wrong) is None
        with pytest.raises(ValueError):
            kernels.paged_decode(
                *tensors, scale=wrong[0], sliding_window=wrong[1], softcap=wrong[2], max_seq_len=wrong[3]
            )


def test_tensors_of_another_device_are_refused():
    pool, message = torch.zeros(1, 1, 4, 8, device="meta"), r"backend\('c'\): expected caches on the CPU, got meta"
    with kernels.backend("c"):
        with pytest.raises(ValueError, match=message):
            dispatch.choose(pool.device, pool.dtype)
        with pytest.raises(ValueError, match=message):
            kernels.copy_blocks(pool, pool, torch.zeros(1, 2, dtype=torch.int64, device="meta"))
        assert "cpu: c" in kernels.describe()


def test_float64_is_refused():
    pool, table, lens = torch.zeros(1, 1, 4, 8).double(), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1).int()
    with kernels.backend("c"), pytest.raises(ValueError, match="key_cache: expected a dtype of .*, got torch.float64"):
        kernels.paged_decode(pool[0, :, :1], pool, pool, table, lens, scale=1.0)


def test_no_blocks_at_all():
    pool = torch.zeros(0, 1, 4, 8)
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    with kernels.backend("c"):
        kernels.copy_blocks(pool, pool, nothing)
        table, lens = torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        out = kernels.paged_decode(torch.ones(1, 1, 8), pool, pool, table, lens, scale=1.0)
    assert not out.any()


def test_without_the_extension_torch_serves_and_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "load", lambda: (None, "the C extension was not built"))
    with caplog.at_level(logging.WARNING, logger="hf_paged_kernels"):
        found, missing = dispatch._find_backends()
    assert "c" not in found and missing["c"] == "the C extension was not built"
    assert [record.getMessage() for record in caplog.records] == [
        "paged attention on the CPU runs in plain torch: the C extension was not built"
    ]


def test_a_library_that_does_not_load_is_a_reason_and_no_crash(monkeypatch, tmp_path):
    (tmp_path / "_paged.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "__init__.py"))
    library, why = cpu.load.__wrapped__()
    assert library is None and why.startswith("the C extension does not load (")


def test_the_library_shares_the_openmp_runtime_of_torch():
    """It is linked to none of its own: a second pool of threads would spin against torch's."""
    code = (
        "import os, torch, hf_paged_kernels\n"
        "torch.set_num_threads(2)\n"
        "a = torch.randn(600, 600); a @ a; torch.sin(torch.randn(10**6))\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "pool = torch.randn(64, 8, 16, 64); lens = torch.tensor([1024], dtype=torch.int32)\n"
        "table = torch.arange(64, dtype=torch.int32)[None]\n"
        "for _ in range(3): hf_paged_kernels.paged_decode(torch.randn(1, 8, 64), pool, pool, table, lens, scale=1.0)\n"
        "print(hf_paged_kernels.op_calls()['paged_decode'], len(os.listdir('/proc/self/task')) - before)\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("counts threads in /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0"]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 127, 16384, 16389, 700003])
def test_content_sums_are_exact_and_the_same_everywhere(size, threads, instruction_set):
    data = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)[1:]  # at an odd address
    others = [torch.arange(50_000), torch.zeros(0), torch.tensor([7.0])]
    found = set()
    for name in cpu.instruction_sets():
        instruction_set(name)
        for count in (1, 2):
            threads(count)
            found.add(tuple(kernels.content_sums([others[0], data, *others[1:]])))
            found.add(tuple(kernels.content_sums([tensor])[0] for tensor in (others[0], data, *others[1:])))
    assert len(found) == 1 and len(set(*found)) >= 3
    before = found.pop()[1]
    for index in {*range(min(size, 9)), size // 2, size - 1} - {-1, size}:
        changed = data.clone()
        changed[index] ^= 128
        assert kernels.content_sums([changed]) != [before]
    assert kernels.content_sums([torch.cat([data, data.new_zeros(1)])]) != [before]
    if size > 20000:  # two stretches that change places
        swapped = torch.cat([data[16384:32768], data[:16384], data[32768:]])
        assert kernels.content_sums([swapped]) != [before]
    with pytest.raises(ValueError, match="contiguous"):
        kernels.content_sums([torch.zeros(4, 4).t()[:, :2]])
