"""The demo's judgement and arithmetic; the demo itself runs in `make demo`."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hf_paged.demo import Oracle, Run, new_tokens, run_demo, summary_table, tokenize, verdict
from hf_paged.demo_prompts import CHATS


def meter(peak_bytes=0, rows=1, seq_length=0, tokens=None):
    held = {"peak_bytes": peak_bytes, "rows": rows, "seq_length": seq_length, "tokens": tokens}
    return SimpleNamespace(positions=rows * seq_length, **held)


def test_verdicts():
    oracle = Oracle(row=[5, 6, 2], gaps=[1.0, 1e-4, 0.5], meter=meter())
    assert verdict([5, 6, 2], oracle) == "equal"
    assert verdict([5, 7, 9], oracle).startswith("tie at token 2")
    assert verdict([4, 6, 2], oracle).startswith("DIFFERS at token 1")
    assert verdict([5, 6], oracle).startswith("DIFFERS at token 3")
    assert verdict([5, 6, 2, 2], oracle).startswith("DIFFERS at token 4")


def test_new_tokens_end_with_the_first_end_of_text():
    output = torch.tensor([[0, 1, 5, 2, 2], [1, 1, 5, 6, 7]])
    inputs = {"input_ids": torch.zeros(2, 2)}
    assert new_tokens(output, inputs, eos_token_id=2) == [[5, 2], [5, 6, 7]]


def test_real_positions_leave_padding_out():
    # prompts of 1 and 4 tokens padded to 4; 3 tokens fed back; the first row ended after 2
    run = Run(rows=[[5, 2], [5, 6, 7, 8]], seconds=2.0, meter=meter(rows=2, seq_length=7))
    assert run.real_positions([1, 4], padded_length=4) == (1 + 2) + (4 + 3)
    assert run.tokens_per_second == 3
    # A cache that holds no padding says itself what it holds.
    assert Run(run.rows, 2.0, meter(rows=1, seq_length=0, tokens=9)).real_positions([1, 4], padded_length=4) == 9


def test_waste_is_what_holds_no_token():
    run = Run(rows=[[5, 2], [5, 6, 7, 8]], seconds=2.0, meter=meter(2 * 2**20, rows=2, seq_length=7))
    text = io.StringIO()
    table = summary_table((run, run), (["equal"], ["equal"]), [1, 4], 4, bytes_per_position=2**20 / 10)
    Console(file=text, width=100).print(table)
    assert "2.0 MiB" in text.getvalue() and "50.0%" in text.getvalue()


def test_wrong_length_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        run_demo(max_new_tokens=0)


@pytest.mark.demo_model
def test_prompts_are_of_very_different_length(demo_model):
    _, tokenizer = demo_model
    batch, alone = tokenize(tokenizer, CHATS)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert min(lengths) < 25 and 500 < max(lengths) < 700
    assert [prompt["input_ids"].shape[1] for prompt in alone] == lengths
    assert batch["attention_mask"][0, 0] == 0 and bool(batch["attention_mask"][:, -1].all())
