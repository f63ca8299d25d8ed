"""Every backend over the grid of kernel_grid.py, against the reference in float64 (CASES B14-B17, B34).

By default a sample in which every pair of axis values occurs; HF_PAGED_GRID=full takes the whole product (`make grid`).
The expected values are checked, too: against a dense computation that shares no code with the reference, and the
bounds by faults that they must see.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_cases import build, check, dense, expected, limits, within
from kernel_grid import AXES, Cell, case_of, everything, run_cell, sample, targets
from tqdm import tqdm

FULL = os.environ.get("HF_PAGED_GRID") == "full"
SAMPLE = sample()


def items() -> Iterator:
    """Parameters of test_grid: a cell for each item, or in the full grid some thousands, under a progress bar."""
    for backend, device in targets():
        if not FULL:
            yield from (pytest.param(backend, device, [c], id=f"{backend}-{device}-{c.name}") for c in SAMPLE)
            continue
        for call, dtype in itertools.product(AXES["call"], AXES["dtype"]):
            cells = list(everything(call=call, dtype=dtype))
            marks = pytest.mark.timeout(0)  # the interpreter takes hours
            yield pytest.param(backend, device, cells, id=f"{backend}-{device}-{call}-{dtype}", marks=marks)


@pytest.mark.parametrize("backend, device, cells", list(items()))
def test_grid(backend, device, cells, capsys):
    failures = []
    with capsys.disabled():
        bar = tqdm(cells, f"{backend} {cells[0].call} {cells[0].dtype}", disable=not FULL, unit="cell")
        for cell in bar:
            bar.set_postfix_str(cell.name)  # stays on the terminal even if the process crashes
            try:
                run_cell(cell, backend, device)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(cells)} cells:\n" + "\n".join(failures[:10])


def test_the_sample_holds_every_pair_of_values():
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(cell[i], cell[j]) for cell in SAMPLE} == set(itertools.product(first, second))
    assert len(SAMPLE) < 150


def test_a_name_says_all_of_a_cell():
    assert [Cell.parse(cell.name) for cell in SAMPLE] == SAMPLE
    one, other = case_of(SAMPLE[7]), case_of(Cell.parse(SAMPLE[7].name))
    assert torch.equal(one.query.nan_to_num(), other.query.nan_to_num()) and one.options["scale"] > 0
    with pytest.raises(ValueError, match="head_dim: expected one of .* got 7"):
        Cell.parse("decode-7-4-1-1-float32-none")
    with pytest.raises(
        AssertionError, match="to repeat: python tests/kernel_grid.py nobody decode-8-4-1-1-float32-none"
    ):
        run_cell(Cell.parse("decode-8-4-1-1-float32-none"), "nobody")


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_expected_values_equal_a_dense_computation(cell):
    case = case_of(cell, short=True)
    (out, lse), (ref, ref_lse) = expected(case), dense(case)
    within(out, ref, torch.tensor(1e-12), "out")
    within(lse, ref_lse, 2**-22 * ref_lse.abs(), "lse")  # the reference returns float32


OPTIONS = dict(window=7, softcap=1.5, sinks=True, starts=[2, 3, 0], head_dim=64, block_size=4, kv_heads=2)
FAULTS = {
    "a scale a little off": lambda case: {"scale": case.options["scale"] * 1.05},
    "no softcap": lambda case: {"softcap": 0.0},
    "no sinks": lambda case: {"sinks": None},
    "a sink under the softcap": lambda case: {"sinks": 1.5 * torch.tanh(case.options["sinks"] / 1.5)},
    "window too wide": lambda case: {"sliding_window": 8},
    "window too narrow": lambda case: {"sliding_window": 6},
    "starts too early": lambda case: {"seq_starts": case.options["seq_starts"] - 1, "sliding_window": 0},
    "starts too late": lambda case: {"seq_starts": case.options["seq_starts"] + 1},
}


@pytest.mark.parametrize("bounds_of", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [None, [1, 3, 5]])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_bounds_see_a_fault(fault, chunks, dtype, bounds_of):
    case = build([9, 6, 8], chunks, dtype=dtype, **OPTIONS)
    ref, _ = expected(case)
    limit = limits(case, bounds_of, ref)
    within(case.run("reference")[0], ref, limit, "right")
    with pytest.raises(AssertionError, match="out of bounds"):
        within(case.run("reference", **FAULTS[fault](case))[0], ref, limit, "wrong")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bounds_see_a_wrong_block_and_a_wrong_length(dtype):
    case = build([9, 6, 8], dtype=dtype, head_dim=64)
    table, seq_lens = case.index
    flipped = table.clone()
    flipped[0, :2] = table[0, :2].flip(0)  # only the order of whole blocks: decode sees the same keys
    check(replace(case, index=(flipped, seq_lens)), "reference", expected(case))
    flipped[0, 0] = table[1, 0]
    for index in ((flipped, seq_lens), (table, seq_lens - 1)):
        with pytest.raises(AssertionError, match="out of bounds"):
            check(replace(case, index=index), "reference", expected(case))
    with pytest.raises(AssertionError, match="nan"):
        check(replace(case, index=(table, seq_lens + torch.tensor([1, 0, 0]).int())), "reference", expected(case))
