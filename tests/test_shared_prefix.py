"""Rows of a decoding step that begin with the same blocks attend to those once: found rightly, and the same tokens."""

import numpy as np
import pytest
import torch
from batcher_helpers import batcher, check, check_idle, greedy
from tiny_models import prompts

from hf_paged import packed_attention, shared_prefix
from hf_paged.shared_prefix import find_shared_prefix

CPU = torch.device("cpu")


@pytest.fixture
def always(monkeypatch):
    """Shares from two rows and one block on; counts the calls."""
    found = []
    real = packed_attention.kernels.paged_decode_shared

    def counted(*args, **kwargs):
        found.append(args[6])
        return real(*args, **kwargs)

    monkeypatch.setattr(packed_attention.kernels, "paged_decode_shared", counted)
    monkeypatch.setitem(shared_prefix.LEAST_SHARED_TOKENS, "cpu", 8)
    for module in ("hf_paged.shared_prefix", "hf_paged.packed_metadata"):
        monkeypatch.setattr(f"{module}.LEAST_ROWS", 2)
    return found


def tables(*rows):
    width = max(map(len, rows))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], dtype=np.int32)


def test_the_largest_set_of_rows_that_share(always):
    found = find_shared_prefix(tables([5, 6, 7, 1], [2, 3], [5, 6, 8], [5, 6, 7, 9]), np.array([13, 7, 11, 15]), 4, CPU)
    assert found.rows.tolist() == [0, 2, 3] and found.num_blocks == 2 and found.starts.tolist() == [8, 0, 8, 8]


def test_all_rows_and_no_block_that_is_not_full_in_all(always):
    found = find_shared_prefix(tables([5, 6, 7], [5, 6, 7]), np.array([9, 11]), 4, CPU)  # samples share a part of 7
    assert found.rows is None and found.num_blocks == 2 and found.starts.tolist() == [8, 8]


@pytest.mark.parametrize(
    "rows, computed", [([[1, 2], [3, 4]], [8, 8]), ([[1, 2], [1, 3]], [3, 8]), ([[1], [1]], [3, 3])]
)
def test_nothing_to_share(always, rows, computed):
    assert find_shared_prefix(tables(*rows), np.array(computed), 4, CPU) is None


def test_a_little_is_not_worth_it():
    assert find_shared_prefix(np.zeros((64, 40), dtype=np.int32), np.full(64, 512), 16, CPU) is None
    assert find_shared_prefix(np.zeros((64, 80), dtype=np.int32), np.full(64, 1100), 16, CPU).num_blocks == 68
    assert find_shared_prefix(np.zeros((64, 80), dtype=np.int32), np.full(64, 1100), 16, torch.device("cuda")) is None


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "gemma2", "gpt_oss", "mistral_swa"])
def test_tokens_are_those_of_plain_generate(always, name):
    system, *tails = prompts((20, 3, 7, 1, 9, 5), seed=3)
    rows = [system + tail for tail in tails] + prompts((6,), seed=4)  # one that shares nothing
    with batcher(name, cache_config={"num_blocks": 120}) as one:
        outputs = one.generate(rows, greedy(), progress_bar=False)
        check(name, rows, outputs)
        check_idle(one)
    windowed_only = name == "mistral_swa"
    assert bool(always) != windowed_only and (windowed_only or max(always) >= 5)


def test_samples_of_one_prompt(always):
    row = prompts((22,), seed=5)[0]
    with batcher("llama_gqa") as one:
        many = one.generate([row], greedy(num_return_sequences=3, num_beams=1, do_sample=True, top_k=1))
    check("llama_gqa", [row] * 3, many)
    assert max(always) == 5
