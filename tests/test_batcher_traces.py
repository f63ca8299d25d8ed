"""Batches against plain generate of each prompt alone: random traces, chunk sizes, tiny pools, every packable model."""

import pytest
from batcher_helpers import (
    PACKABLE,
    PACKABLE_MORE,
    REFUSED,
    batcher,
    check,
    check_idle,
    expected,
    greedy,
    model_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import assert_same_text, prompts

import hf_paged

LENGTHS = (5, 17, 33, 12, 1, 16)


@pytest.mark.parametrize("name", [*PACKABLE, *PACKABLE_MORE])
def test_every_packable_model(name):
    rows = prompts(LENGTHS)
    # Chunks of 9 tokens beside decoding rows, and too few blocks for all six.
    with batcher(name, cache_config={"num_blocks": 22}, max_num_batched_tokens=13, chunked_prefill_size=9) as one:
        check(name, rows, one.generate(rows, greedy(24)), 24)
        check_idle(one)
        assert one.stats().preemptions or one.stats().steps > 24


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_with_the_reason(name):
    with pytest.raises(hf_paged.PackingError, match=REFUSED[name]):
        batcher(name)


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 32, 64])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma2"])
def test_chunked_prefill_changes_nothing(name, chunk):
    neighbours, rows = prompts((4, 7), seed=1), prompts((33, 48))
    config = {"block_size": 16, "num_blocks": 24}
    with batcher(name, cache_config=config, chunked_prefill_size=chunk, max_num_batched_tokens=chunk + 3) as one:
        first = [one.add_request(row, generation_config=greedy(40)) for row in neighbours]
        one.step()
        outputs = list(one.stream(rows, greedy()))
        for row in rows:
            mine = [output for output in outputs if list(output.prompt_token_ids) == row]
            assert [output.new_token_ids for output in mine] == [(token,) for token in mine[-1].output_token_ids]
        check(name, rows, [[o for o in outputs if list(o.prompt_token_ids) == row][-1] for row in rows])
        check(name, neighbours, [one.result(request_id) for request_id in first], 40)


TRACE = st.lists(
    st.tuples(st.integers(0, 25), st.sampled_from([1, 2, 5, 8, 15, 16, 17, 31]), st.integers(1, 10), st.integers(0, 5)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "gemma3", "deepseek_v3", "gpt2"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    trace=TRACE,
    num_blocks=st.integers(14, 30),
    block_size=st.sampled_from([3, 4, 16]),
    chunk=st.integers(1, 64),
    seqs=st.integers(1, 6),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=3),
)
def test_random_traces(name, trace, num_blocks, block_size, chunk, seqs, aborts):
    cache = {"num_blocks": num_blocks, "block_size": block_size}
    one = batcher(name, cache_config=cache, max_num_batched_tokens=chunk, max_num_seqs=seqs)
    pending, ids, last, aborted = sorted(trace), [], {}, set()
    step = 0
    while pending or len(last) < len(ids):
        while pending and pending[0][0] <= step:
            _, length, new, seed = pending.pop(0)
            [row] = prompts((length,), seed)
            ids.append((one.add_request(row, generation_config=greedy(new)), row, new))
        for when, which in aborts:
            if when == step and which < len(ids) and one.abort(ids[which][0]):
                aborted.add(ids[which][0])
        outputs = one.step()
        assert outputs or not one.has_work
        for output in outputs:
            assert output.request_id not in last, "something came after the end"
            if output.finished:
                last[output.request_id] = output
        one.check_integrity()
        step += 1
        assert step < 3000
    for request_id, row, new in ids:
        output = last[request_id]
        got, want = list(output.output_token_ids), expected(name, row, 10)[:new]
        if request_id in aborted:
            assert output.finish_reason == "abort"
            want = want[: len(got)]
        assert_same_text(model_of(name), row, got, want)
    check_idle(one)
    one.close()


def test_preemption_loses_nothing():
    rows = prompts((6,) * 8)
    with batcher(cache_config={"num_blocks": 14}) as one:
        check("llama_gqa", rows, one.generate(rows, greedy(40)), 40)
        assert one.stats().preemptions > 3
        check_idle(one)
