"""Prefix sharing when something is dropped, goes wrong or is cut off; events; random traces.

Contract of all tests: afterwards what is found was really written, which the texts show, and every block is free,
cached or held.
"""

import functools

import pytest
from batcher_helpers import batcher, check, expected, greedy, model_of, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batched import letters
from test_batcher_failure import Boom, break_forward
from test_batcher_prefix import NAME, SYSTEM, cached, free, told_apart
from test_prefix_cache import constant, one_bit
from tiny_models import assert_same_text, build, prompts

from hf_paged.prefix_tree import chain_hash

ROWS = told_apart(4)


# Dropping


def test_a_prompt_that_changed_is_found_no_more():
    other = prompts((21,), seed=8)[0]
    with batcher(tokenizer=letters()) as one:
        one.generate([*ROWS, other], greedy(6))
        gone = one.invalidate_prefix(SYSTEM)
        assert len(gone.block_ids) == 1 and len(gone.block_ids[0]) >= 10 + 4 and gone.request_ids == ()
        one.check_integrity()
        assert one.stats().prefix_invalidations >= 14
        outputs = one.generate([ROWS[1], other], greedy(6))
        check(NAME, [ROWS[1], other], outputs, 6)
        assert cached(outputs) == [0, 20]
        # As a text, by a first part, and by one block: then what lies before it stays.
        text = one.tokenizer.decode(SYSTEM[:9])
        assert one.intake.token_ids(text) == SYSTEM[:9] and len(one.invalidate_prefix(text).block_ids[0]) >= 10
        assert cached(one.generate([ROWS[1]], greedy(6))) == [0]
        assert one.invalidate_prefix(SYSTEM[1:]).block_ids == ((),)
        prefix = one._engine.prefix
        node = prefix.tree.root(())
        for start in range(0, 12, 4):
            tokens = tuple(SYSTEM[start : start + 4])
            node = prefix.tree.find(node, tokens, prefix.tree.hash_of(node, tokens))
        gone = one.invalidate_prefix(block_id=node.blocks[0])
        assert node.blocks == [-1] and len(gone.block_ids[0]) >= 8
        outputs = one.generate([ROWS[1], ROWS[2]], greedy(6))
        check(NAME, [ROWS[1], ROWS[2]], outputs, 6)
        assert cached(outputs) == [8, 40]
        free(one)


def test_wrong_arguments_of_invalidation_change_nothing():
    with batcher() as one:
        one.generate(ROWS[:1], greedy(2))
        for arguments, message in (
            ({}, "either token_ids or block_id"),
            ({"token_ids": [5], "block_id": 3}, "either token_ids or block_id"),
            ({"block_id": 60}, "60 is out of range for a pool of 60"),
            ({"block_id": -1}, "-1 is out of range"),
            ({"block_id": True}, "True is out of range"),
            ({"block_id": 0, "group": 1}, "group 1 is out of range, the model has 1 groups"),
            ({"block_id": 0, "group": True}, "group True is out of range"),
            ({"token_ids": []}, "an empty prompt"),
            ({"token_ids": [199]}, "token id 199 is out of range"),
            ({"token_ids": "text"}, "needs a tokenizer"),
        ):
            with pytest.raises(ValueError, match=message):
                one.invalidate_prefix(**arguments)
        assert one.stats().prefix_invalidations == 0
        assert cached(one.generate(ROWS[:1], greedy(2))) == [42]
        free(one)
    with pytest.raises(RuntimeError, match="closed"):
        one.invalidate_prefix([5])
    with pytest.raises(RuntimeError, match="closed"):
        one.reset_prefix_cache()


@pytest.mark.parametrize("how", ["tokens", "block", "reset", "short"])
def test_running_requests_keep_what_they_hold(how):
    row = ROWS[0] if how != "short" else [5, 6, 7]
    with batcher() as one:
        running = one.add_request(row, generation_config=greedy(20), request_id="mine")
        later = one.add_request(prompts((9,))[0], generation_config=greedy(20), request_id="other")
        for _ in range(2):
            one.step()
        held = int(one._engine.scheduler.batch.block_tables[0][one._engine.scheduler.batch.requests[0].row, 0])
        if how == "reset":
            gone = one.reset_prefix_cache()
            assert gone.request_ids == ("mine", "other")
        else:
            gone = one.invalidate_prefix(row) if how == "tokens" else one.invalidate_prefix(block_id=held)
            assert gone.request_ids == ("mine",)
        assert held in gone.block_ids[0]
        one.check_integrity()
        outputs = [one.result(running), one.result(later)]
        check(NAME, [row, prompts((9,))[0]], outputs, 20)
        again = one.generate([row], greedy(20))
        check(NAME, [row], again, 20)
        assert cached(again) == [0]  # not recorded by the request that ran, either
        free(one)


def test_a_callback_cannot_drop_in_the_middle_of_a_step(caplog):
    refused = []

    def ask(kind, event):
        try:
            one.reset_prefix_cache()
        except RuntimeError as error:
            refused.append((kind, str(error)))

    with batcher(on_event=ask, cache_config={"num_blocks": 14}) as one:
        for seed in range(3):
            rows = prompts((33, 20), seed=seed)
            check(NAME, rows, one.generate(rows, greedy(4)), 4)
            one.check_integrity()
        assert {"block_stored"} <= {kind for kind, _ in refused}
        assert all("inside a step" in message for _, message in refused)
        free(one)


def test_a_batcher_without_sharing_has_nothing_to_drop():
    with batcher(cache_config={"enable_prefix_caching": False}) as one:
        for _ in range(2):
            outputs = one.generate(ROWS, greedy(3))
            check(NAME, ROWS, outputs, 3)
            assert cached(outputs) == [0] * 4
        assert one.invalidate_prefix(SYSTEM) == one.reset_prefix_cache() == ((), ())
        stats = one.stats()
        assert (stats.blocks_cached, stats.prefix_hit_rate, stats.prefix_evictions) == (0, 0.0, 0)
        free(one)


def test_figures():
    with batcher(cache_config={"num_blocks": 24}) as one:
        one.generate(ROWS[:2], greedy(1))
        stats = one.stats()
        assert stats.prefix_hit_tokens == 40 and stats.prefix_hit_rate == 40 / 86
        assert stats.blocks_cached == 12 and stats.blocks_used == 0 and stats.prefix_evictions == 0
        one.generate(prompts((60,), seed=6), greedy(1))
        stats = one.stats()
        assert stats.blocks_cached == 24 and stats.prefix_evictions == 3
        one.reset_prefix_cache()
        assert one.stats().blocks_cached == 0 and one.stats().prefix_invalidations == 24
        free(one)


# Events


class Router:
    """Knows by the events alone which chains of blocks can be found."""

    def __init__(self):
        self.chains, self.kinds = {}, []

    def __call__(self, kind, event):
        self.kinds.append(kind)
        if kind == "block_stored":
            assert event.block_hash not in self.chains
            assert event.block_hash == chain_hash(event.parent_hash, event.token_ids)
            self.chains[event.block_hash] = event
        elif kind.startswith("block"):
            assert kind in ("block_evicted", "block_invalidated")
            assert self.chains.pop(event.block_hash) == event

    def check(self, one):
        nodes = one._engine.prefix.tree.nodes()
        findable = {node.hash for node in nodes if len(node.tokens) == 4 and set(node.blocks) != {-1}}
        assert findable == set(self.chains)


@pytest.mark.parametrize("name", [NAME, "mistral_swa", "gemma3"])
def test_events_tell_a_router_what_can_be_found(name, caplog):
    router = Router()
    with batcher(name, on_event=router, cache_config={"num_blocks": 24}, chunked_prefill_size=9) as one:
        for turn in range(6):
            rows = [*told_apart(2, own=1 + 4 * turn, seed=turn), *prompts((23, 5), seed=50 + turn)]
            one.generate(rows, greedy(3), prompt_logprobs=[None, 0 if turn % 2 else None, None, None])
            router.check(one)
            if turn == 3:
                one.invalidate_prefix(SYSTEM[:4])
                router.check(one)
        assert {"block_stored", "block_evicted", "block_invalidated", "added", "finished"} <= set(router.kinds)
        one.reset_prefix_cache()
        assert not router.chains
    assert "on_event raised" not in caplog.text


def test_events_after_an_interrupt_tell_that_everything_is_gone():
    router, model = Router(), build(NAME)
    with batcher(model, on_event=router) as one:
        one.generate(ROWS, greedy(3))
        assert router.chains
        cut_off(one, "record", at=1)
        with pytest.raises(KeyboardInterrupt):
            one.generate([prompts((30,), seed=3)[0]], greedy(3))
        one.check_integrity()
        router.check(one)
        check(NAME, ROWS, one.generate(ROWS, greedy(3)), 3)
        router.check(one)


# What goes wrong


def cut_off(one, method: str, at: int):
    """Have Ctrl-C arrive at call `at` of a method of the prefix cache or of its tree; return how to undo that."""
    owner = one._engine.prefix
    owner = owner if hasattr(owner, method) else owner.tree
    original, calls = getattr(owner, method), [0]

    def interrupted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            original(*args, **kwargs)
            setattr(owner, method, original)
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    setattr(owner, method, interrupted)
    return lambda: setattr(owner, method, original)


@pytest.mark.parametrize("at", [1, 2, 3, 7])
@pytest.mark.parametrize("method", ["match", "begin", "record", "took", "add", "place", "find", "fade"])
def test_an_interrupt_at_any_place(method, at):
    with batcher(chunked_prefill_size=16) as one:
        one.generate(ROWS[:1], greedy(3))
        undo = cut_off(one, method, at)
        ids = [one.add_request(row, generation_config=greedy()) for row in (ROWS[1], ROWS[2], SYSTEM[:30])]
        try:
            while one.step():
                pass
        except KeyboardInterrupt:
            one.check_integrity()
        undo()
        outputs = [one.result(request_id) for request_id in ids]
        check(NAME, [ROWS[1], ROWS[2], SYSTEM[:30]], outputs)
        check(NAME, ROWS, one.generate(ROWS, greedy()))
        free(one)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_forward_that_fails_in_a_shared_prefill(at, error):
    """The leader's chunk is half written: nobody may find it before it was computed again."""
    model = build(NAME)
    with batcher(model, chunked_prefill_size=16) as one:
        break_forward(model, at, error=error, inside=True, times=2)
        ids = [one.add_request(row, generation_config=greedy()) for row in ROWS]
        failures = 0
        while one.has_work:
            try:
                one.step()
            except error:
                failures += 1
                other = prompts((9,), seed=failures)[0]
                ids.append(one.add_request([*SYSTEM[:20], *other], generation_config=greedy()))
            one.check_integrity()
        assert failures == 2
        rows = [*ROWS, *([*SYSTEM[:20], *prompts((9,), seed=seed)[0]] for seed in (1, 2))]
        check(NAME, rows, [one.result(request_id) for request_id in ids])
        check(NAME, ROWS, one.generate(ROWS, greedy()))
        free(one)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_leader_of_a_shared_prefill_leaves(steps):
    with batcher(chunked_prefill_size=16) as one:
        ids = [one.add_request(row, generation_config=greedy()) for row in ROWS]
        for _ in range(steps):
            one.step()
        one.abort(ids[0])
        one.check_integrity()
        check(NAME, ROWS[1:], [one.result(request_id) for request_id in ids[1:]])
        check(NAME, ROWS, one.generate(ROWS, greedy()))
        free(one)


def test_a_generate_call_that_is_cut_off_leaves_nothing_wrong_behind():
    model = build(NAME)
    with batcher(model, chunked_prefill_size=16) as one:
        for at in (2, 3, 5):
            broken = break_forward(model, at, error=KeyboardInterrupt, inside=True)
            with pytest.raises(KeyboardInterrupt):
                one.generate(ROWS, greedy())
            assert broken[0] == at
            del model.model.layers[1].forward
            outputs = one.generate(ROWS, greedy())
            check(NAME, ROWS, outputs)
            one.reset_prefix_cache()
        free(one)


# Random traces

PROMPTS = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=22)
TRACE = st.lists(st.tuples(PROMPTS, st.integers(1, 8), st.integers(0, 5)), min_size=2, max_size=9)


@functools.cache
def right(name: str, prompt: tuple[int, ...]) -> list[int]:
    return plain(model_of(name), prompt, **greedy(8))


@pytest.mark.parametrize("name", [NAME, "gemma3"])
@settings(max_examples=30)
@given(
    trace=TRACE,
    num_blocks=st.integers(12, 40),
    hash_function=st.sampled_from([constant, one_bit, chain_hash]),
    chunk=st.sampled_from([None, 1, 3, 8]),
)
def test_random_traces(name, trace, num_blocks, hash_function, chunk):
    config = {"num_blocks": num_blocks}
    with batcher(
        name, cache_config=config, max_num_seqs=4, max_num_batched_tokens=12, chunked_prefill_size=chunk
    ) as one:
        one._engine.prefix.tree.hash_function = hash_function
        ids = []
        for prompt, new, steps in trace:
            ids.append((one.add_request(prompt, generation_config=greedy(new)), prompt, new))
            for _ in range(min(steps, 3)):
                one.step()
            if steps == 4:
                one.abort(ids[-1][0])
            if steps == 5:
                one.invalidate_prefix(prompt[:3])
            one.check_integrity()
        for request_id, prompt, new in ids:
            output = one.result(request_id)
            got, want = list(output.output_token_ids), right(name, tuple(prompt))[:new]
            if output.finish_reason == "abort":
                want = want[: len(got)]
            assert_same_text(model_of(name), prompt, got, want)
        free(one)


def test_random_traces_do_share():
    """Such prompts begin alike often enough for the traces to mean something."""
    rows = [[3, 4, 3, 3, 4, 4, 3, 4, 3][:length] for length in (9, 7, 5)]
    with batcher() as one:
        outputs = [one.generate([row], greedy(8))[0] for row in rows]
        assert cached(outputs) == [0, 6, 4] and expected(NAME, rows[0], 8) == list(outputs[0].output_token_ids)
