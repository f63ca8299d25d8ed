"""Prefix sharing with real (tiny) models: what is computed once, and that every text stays plain generate's.

A request that hits must be told apart from one that was computed anew by its count of cached tokens alone.
"""

import itertools

import pytest
import torch
from batcher_helpers import (
    PACKABLE,
    PACKABLE_MORE,
    batcher,
    check,
    check_idle,
    expected,
    greedy,
    in_threads,
    model_of,
    plain,
)
from scheduler_helpers import Simulation
from test_batched import letters
from test_prefix_cache import constant, one_bit
from tiny_models import assert_same_text, prompts

from hf_paged import ContinuousBatcher
from hf_paged.prefix_cache import PrefixCache

NAME = "llama_gqa"
SYSTEM = prompts((40,), seed=21)[0]
WINDOWED = ["mistral_swa", "gemma2", "gemma3", "gpt_oss", "gemma3n"]
WINDOWED_MORE = ["mixtral", "phi3", "cohere2", "starcoder2", "exaone4"]


def told_apart(count: int, own: int = 3, system=SYSTEM, seed: int = 5) -> list[list[int]]:
    """Prompts that begin with `system` and go on with `own` tokens each of their own."""
    return [[*system, *tail] for tail in prompts((own,) * count, seed=seed)]


def cached(outputs) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def free(one: ContinuousBatcher) -> None:
    """Idle, and every block is free or cached."""
    check_idle(one)
    stats = one.stats()
    pools = [group.manager.pool for group in one._engine.scheduler.groups]
    assert sum(pool.available_blocks for pool in pools) == stats.blocks_total
    assert sum(pool.cached_blocks for pool in pools) == stats.blocks_cached


# Computed once


def test_one_system_prompt_of_512_tokens_is_computed_once():
    """64 requests, a system prompt of 512 tokens and 32 of their own each: 12 % of the prompts' tokens at most."""
    rows = told_apart(64, own=32, system=prompts((512,), seed=3)[0])
    model, new, made = model_of(NAME), 4, []
    for sharing in (True, False):
        config = {"enable_prefix_caching": sharing}
        with ContinuousBatcher(model, cache_config=config) as one:
            made.append(one.generate(rows, greedy(new)))
            stats = one.stats()
            computed = stats.prompt_tokens + len(rows)  # a prompt's last token is counted with the new ones
            assert stats.new_tokens == len(rows) * new
            if sharing:
                assert computed + stats.prefix_hit_tokens == sum(map(len, rows))
                assert computed <= 0.12 * sum(map(len, rows)) and stats.prefix_hit_rate > 0.9
            else:
                assert computed == sum(map(len, rows)) and stats.prefix_hit_tokens == stats.blocks_cached == 0
            free(one)
    shared, alone = made
    assert cached(shared)[0] == 0 and all(count >= 512 for count in cached(shared)[1:]) and set(cached(alone)) == {0}
    for index, (one, other) in enumerate(zip(shared, alone, strict=True)):
        want = list(other.output_token_ids)
        assert_same_text(model, rows[index], list(one.output_token_ids), want)
        if index in (0, 1, 63):
            assert_same_text(model, rows[index], want, plain(model, rows[index], **greedy(new)))


@pytest.mark.parametrize("name", [*PACKABLE, *PACKABLE_MORE])
def test_every_packable_model_twice(name):
    rows = prompts((17, 33))
    with batcher(name) as one:
        first, again = one.generate(rows, greedy(8)), one.generate(rows, greedy(8))
        check(name, rows * 2, first + again, 8)
        assert cached(first) == [0, 0] and cached(again) == [16, 32]
        free(one)


# What chunks do to windows is one code for all models: of those of the second zoo two sizes are enough.
@pytest.mark.parametrize(
    "name, chunk",
    [*itertools.product(WINDOWED, (1, 3, 16, 64)), *itertools.product(WINDOWED_MORE, (3, 64))],
)
def test_windows_share_in_chunks_and_in_tiny_pools(name, chunk):
    """The common part is five windows long; seven requests do not fit into 26 blocks at once."""
    rows, new = [*told_apart(5), SYSTEM[:30], [*SYSTEM[:22], 7, 7]], 10
    config = {"num_blocks": 26}
    with batcher(name, cache_config=config, chunked_prefill_size=chunk, max_num_batched_tokens=chunk + 4) as one:
        first = one.generate(rows, greedy(new))
        again = one.generate(rows, greedy(new))
        check(name, rows * 2, first + again, new)
        assert sum(count > 0 for count in cached(first + again)) >= 7
        assert one.stats().prefix_hit_tokens > 0
        free(one)


def test_preemption_recomputes_less():
    rows, again = prompts((6,) * 8), []
    for sharing in (True, False):
        with batcher(cache_config={"num_blocks": 30, "enable_prefix_caching": sharing}) as one:
            check(NAME, rows, one.generate(rows, greedy(40)), 40)
            stats = one.stats()
            assert stats.preemptions > 3 and (stats.prefix_hit_tokens > 0) == sharing
            again.append(stats.prompt_tokens + stats.new_tokens - sum(len(row) + 39 for row in rows))
            free(one)
    assert again[0] < 0.8 * again[1]  # whoever goes on takes most of the blocks of who gave way


@pytest.mark.parametrize("length", [8, 16, 32])
def test_exact_multiples_of_a_block_sent_twice(length):
    row = SYSTEM[:length]
    with batcher() as one:
        outputs = [one.generate([row], greedy())[0] for _ in range(3)]
        check(NAME, [row] * 3, outputs)
        assert cached(outputs) == [0, length - 1, length - 1]
        free(one)


def test_four_prompts_with_one_prefix_in_the_same_step():
    rows = told_apart(4)
    with batcher() as one:
        outputs = one.generate(rows, greedy())
        check(NAME, rows, outputs)
        assert cached(outputs) == [0, 40, 40, 40]
        assert one.stats().prompt_tokens == len(rows[0]) - 1 + 3 * 2
        free(one)


def test_who_waits_is_not_looked_up_in_every_step():
    simulation, looked_up = Simulation(num_blocks=80, share=True, chunked_prefill_size=4), []
    match = simulation.prefix.match
    simulation.prefix.match = lambda request: looked_up.append(request.key) or match(request)
    made = [simulation.add([*range(100, 140), key, key], new=1) for key in range(2, 12)]
    other = simulation.add([*range(100, 120), 50, 51], new=1)  # shares half of it
    simulation.run()
    assert simulation.num_computed == 42 + 10 * 2 - 2 + 2
    assert [request.num_cached_tokens for request in (*made, other)] == [0, *[40] * 9, 20]
    assert len(looked_up) == 1 + 10 * 2


def test_a_hot_prefix_survives_a_stream_of_others():
    with batcher(cache_config={"num_blocks": 24}) as one:
        one.generate([SYSTEM], greedy(1))
        for seed in range(12):
            [other], [mine] = prompts((23,), seed=100 + seed), told_apart(1, seed=200 + seed)
            outputs = one.generate([other], greedy(4)) + one.generate([mine], greedy(4))
            check(NAME, [other, mine], outputs, 4)
            assert cached(outputs) == [0, 40]
        assert one.stats().prefix_evictions > 20
        free(one)


def test_samples_share_with_what_came_before_and_what_comes_after():
    with batcher() as one:
        row = told_apart(1)[0]
        first = one.generate([row], greedy(num_return_sequences=3))
        check(NAME, [row] * 3, first)
        longer = [*row, *first[1].output_token_ids, 9]
        outputs = one.generate([longer], greedy(num_return_sequences=2))
        check(NAME, [longer] * 2, outputs)
        assert outputs[0].num_cached_tokens >= 52
        free(one)


# Right whatever the hashes, the order and the threads


@pytest.mark.parametrize("hash_function", [constant, one_bit])
def test_equal_hashes_change_no_text(hash_function):
    a, b, c = SYSTEM[:4], SYSTEM[4:8], SYSTEM[8:12]
    other = [token + 1 for token in b]
    rows = [[*a, *b, *c, 7], [*a, *other, *c, 7], [*other, *b, *c, 7], [*a, *b, *other, 7], [5, 123] * 5, [51, 23] * 5]
    rows += [[0] * 9, [198] * 9]
    with batcher() as one:
        one._engine.prefix.__init__(one._engine.scheduler.groups, hash_function)
        for turn in range(2):
            outputs = one.generate(rows, greedy())
            check(NAME, rows, outputs)
            if turn:
                assert all(count >= 8 for count in cached(outputs))
        assert isinstance(one._engine.prefix, PrefixCache)
        free(one)


def test_results_belong_to_their_prompts_whoever_asks_and_in_whatever_order():
    rows = [*told_apart(6), *prompts((5, 17, 33, 12, 8, 21))]
    with batcher(cache_config={"num_blocks": 80}) as one:
        for _ in range(2):
            check(NAME, rows, one.generate(rows, greedy()))
        one.start()

        def ask(part):
            ids = [one.add_request(row, generation_config=greedy()) for row in part]
            return [one.result(request_id) for request_id in reversed(ids)][::-1]

        halves = in_threads(lambda: ask(rows[:6]), lambda: ask(rows[6:]))
        check(NAME, rows, halves[0] + halves[1])
        assert min(cached(halves[0])) >= 40
        one.stop()
        free(one)


# Log-probabilities, stops


@pytest.mark.parametrize("order", [(31, 32, 33), (33, 32, 31)])
def test_prompt_logprobs_are_those_of_one_forward_both_times(order):
    [row] = prompts((33,), seed=9)
    model = model_of(NAME)
    with torch.no_grad():
        right = model(torch.tensor([row])).logits[0].log_softmax(-1)
    with batcher(cache_config={"block_size": 16, "num_blocks": 20}) as one:
        for _ in range(2):
            for length in order:
                mine = row[:length]
                output = one.generate([mine], greedy(3), prompt_logprobs=2, logprobs=2)[0]
                assert output.num_cached_tokens == 0  # all of its logits are wanted
                told = output.prompt_logprobs
                assert told[0] is None and [entry.token_id for entry in told[1:]] == mine[1:]
                want = right[: length - 1].gather(1, torch.tensor(mine[1:])[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor([e.logprob for e in told[1:]]), want, rtol=0, atol=1e-5)
                best = right[: length - 1].topk(2).values
                torch.testing.assert_close(
                    torch.tensor([[p for _, p in e.top] for e in told[1:]]), best, rtol=0, atol=1e-5
                )
                # The same prompt, now found: the log-probabilities of what is generated do not depend on it.
                found = one.generate([mine], greedy(3), logprobs=2)[0]
                assert found.num_cached_tokens == length - 1 - (length - 1) % 16 + (length - 1) % 16
                assert found.output_token_ids == output.output_token_ids
                for a, b in zip(found.logprobs, output.logprobs, strict=True):
                    assert abs(a.logprob - b.logprob) < 1e-5 and [t for t, _ in a.top] == [t for t, _ in b.top]
        free(one)


def test_what_a_stop_string_ended_is_continued_right():
    model, tokenizer, [row] = model_of(NAME), letters(), prompts((13,), seed=2)
    whole = expected(NAME, row, 24)
    stop = tokenizer.decode([whole[9]])
    with batcher(tokenizer=tokenizer) as one:
        stopped = one.generate([row], greedy(24, stop_strings=[stop]))[0]
        text = list(stopped.output_token_ids)
        assert stopped.finish_reason == "stop" and text == whole[: len(text)] and len(text) % 4
        more = prompts((20,), seed=4)[0]
        rows = [[*row, *text, *more[:count]] for count in range(1, 21)]
        outputs = one.generate(rows, greedy(6))
        for mine, output in zip(rows, outputs, strict=True):
            assert output.num_cached_tokens >= len(row) + len(text) - 1 - 3
            assert_same_text(model, mine, list(output.output_token_ids), plain(model, mine, **greedy(6)))
        free(one)
