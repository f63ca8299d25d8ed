"""Blocks found again: what is shared, only after it was written, and what is forgotten when.

`Simulation` asserts in every step that what a request sees was written for its own tokens.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import Simulation

from hf_paged.prefix_tree import chain_hash

SYSTEM = list(range(100, 116))  # four blocks


def constant(parent, tokens, extra=()):
    return 0


def one_bit(parent, tokens, extra=()):
    return chain_hash(parent, tokens, extra) & 1


def shared(**options) -> Simulation:
    return Simulation(**{"num_blocks": 40, "share": True, **options})


def run(simulation, *prompts, **options):
    """Requests added together and run to their end."""
    made = [simulation.add(prompt, **options) for prompt in prompts]
    simulation.run()
    return made


def test_a_prompt_that_came_before_is_computed_but_for_its_last_token():
    simulation = shared()
    first, again = run(simulation, [*SYSTEM, 1])[0], run(simulation, [*SYSTEM, 1])[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    whole = run(simulation, SYSTEM)[0]  # a multiple of blocks: its last block is copied, its last token computed
    assert whole.num_cached_tokens == 15
    assert run(simulation, SYSTEM)[0].num_cached_tokens == 15


def test_a_hit_ends_inside_a_block():
    simulation = shared()
    run(simulation, [*SYSTEM, 1, 2, 3])
    assert run(simulation, [*SYSTEM, 1, 2, 9, 9])[0].num_cached_tokens == 18
    assert run(simulation, [*SYSTEM[:6], 9, 9, 9])[0].num_cached_tokens == 6
    assert run(simulation, [100, 9, 9, 9])[0].num_cached_tokens == 0  # for one token no block is copied


def test_what_was_generated_is_found_as_well():
    simulation = shared()
    first = run(simulation, [*SYSTEM, 1], new=9)[0]
    turn = [*first.prompt_token_ids, *first.output_token_ids]
    assert len(turn) == 26 and run(simulation, [*turn, 50, 51])[0].num_cached_tokens == 24


def test_requests_of_one_step_compute_together_what_they_share_once():
    simulation = shared()
    made = run(simulation, *([*SYSTEM, 1, 2 + index] for index in range(4)), new=2)
    assert [request.num_cached_tokens for request in made][0] == 0
    assert all(request.num_cached_tokens >= 16 for request in made[1:])
    assert simulation.num_computed == 18 + 3 * 2 + 4


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, None])
def test_a_long_prompt_in_chunks_is_waited_for(chunk):
    simulation = shared(chunked_prefill_size=chunk)
    made = run(simulation, *([*SYSTEM, *SYSTEM, index, index] for index in (1, 2, 3)), new=1)
    assert [request.num_cached_tokens for request in made] == [0, 32, 32]


def test_who_was_waited_for_may_leave():
    simulation = shared(chunked_prefill_size=4)
    first, second = simulation.add([*SYSTEM, 1]), simulation.add([*SYSTEM, 2])
    simulation.step()
    assert second.row < 0
    simulation.scheduler.finish(first, "abort")
    simulation.run()
    assert second.finish_reason == "length" and second.num_cached_tokens == 4


def test_a_more_urgent_request_does_not_wait():
    simulation = shared(chunked_prefill_size=4, policy="priority")
    simulation.add([*SYSTEM, 1], priority=5)
    simulation.step()
    urgent = simulation.add([*SYSTEM, 2], priority=0)
    simulation.step()
    assert urgent.row >= 0
    simulation.run()


def test_salts_never_share():
    simulation = shared()
    for salt in ("a", "b", None, "a"):
        request = run(simulation, [*SYSTEM, 1], salt=salt)[0]
        last = request.num_cached_tokens
        assert last == (16 if simulation.keys == 4 else 0)


def test_tails_are_evicted_first_and_a_hot_prefix_stays():
    simulation = shared(num_blocks=12)
    run(simulation, [*SYSTEM, 1])
    for index in range(30):
        run(simulation, [500 + 9 * index + i for i in range(9)], new=2)  # one-off
        assert run(simulation, [*SYSTEM, 30 + index])[0].num_cached_tokens == 16
    assert simulation.prefix.num_evicted > 30


@pytest.mark.parametrize("limit, stays", [(1000, True), (12, False)])
def test_a_pool_that_grows_keeps_what_is_hot_and_does_not_grow_for_ever(limit, stays):
    simulation = shared(num_blocks=0)
    group = simulation.groups[0]
    group.max_blocks = limit
    sizes = []

    def grow(num_blocks):
        missing = num_blocks - group.manager.available_blocks
        if group.manager.num_blocks + missing > limit:
            raise RuntimeError("no more")
        group.manager.grow(max(0, missing))
        sizes.append(group.manager.num_blocks)

    group._grow = grow
    run(simulation, [*SYSTEM, *SYSTEM, 1])
    for index in range(20):
        run(simulation, range(500 + 40 * index, 533 + 40 * index))
        found = run(simulation, [*SYSTEM, *SYSTEM, 30 + index])[0].num_cached_tokens
        assert found == 32 or not stays
    assert max(sizes) <= 2 * 10 + 1  # twice what a request holds


def test_half_of_a_chain_that_was_evicted_is_not_used():
    simulation = shared(num_blocks=8)
    run(simulation, [*SYSTEM, 1])  # five blocks, the tail to go first
    run(simulation, range(300, 316), new=4)
    found = run(simulation, [*SYSTEM, 1])[0].num_cached_tokens
    assert found in (4, 8, 12)


@pytest.mark.parametrize("windows", [(5,), (0, 5), (6, 0, 1), (40,)])
def test_windows_share(windows):
    simulation = shared(windows=windows)
    run(simulation, [*SYSTEM, *SYSTEM, 1])
    assert run(simulation, [*SYSTEM, *SYSTEM, 2])[0].num_cached_tokens == 32
    assert run(simulation, [*SYSTEM, 3])[0].num_cached_tokens == 16  # what the window has passed is still there


def test_preempted_requests_find_what_they_had():
    simulation = shared(num_blocks=9)
    made = run(simulation, *([200 + index] * 9 for index in range(4)), new=10)
    assert simulation.scheduler.num_preemptions > 0
    least = sum(len(request.prompt_token_ids) + 9 for request in made)
    again = simulation.num_computed - least
    without = Simulation(num_blocks=9)
    run(without, *([200 + index] * 9 for index in range(4)), new=10)
    assert again < (without.num_computed - least) / 2


def test_samples_of_one_prompt_record_what_they_wrote():
    simulation = shared()
    simulation.add([*SYSTEM, 1, 2], samples=3, new=8)
    simulation.run()
    for sample in simulation.requests[:3]:
        turn = [*sample.prompt_token_ids, *sample.output_token_ids, 7]
        assert run(simulation, turn)[0].num_cached_tokens >= 24


@pytest.mark.parametrize("hash_function", [constant, one_bit, chain_hash])
def test_equal_hashes_do_no_harm(hash_function):
    simulation = shared(hash_function=hash_function, num_blocks=80)
    prompts = [[*SYSTEM, 1], [9, *SYSTEM[1:], 1], [*SYSTEM[:4], 9, *SYSTEM[5:], 1], [0] * 8, [2**31] * 8]
    prompts += [[1, 23] * 4, [12, 3] * 4]
    for _ in range(2):
        run(simulation, *prompts)
    assert [run(simulation, prompt)[0].num_cached_tokens for prompt in prompts] == [16, 16, 16, 7, 7, 7, 7]


def test_hashes_chain_and_say_what_they_depend_on():
    assert chain_hash(0, (1, 2)) == chain_hash(0, [1, 2]) != chain_hash(1, (1, 2))
    seen = {
        chain_hash(0, tokens, extra)
        for tokens in [(), (0,), (2**31,), (1, 23), (12, 3)]
        for extra in [(), ("x", None), (None, "x")]
    }
    assert len(seen) == 15


def test_invalidation_of_tokens_takes_all_that_begins_so():
    simulation = shared()
    run(simulation, [*SYSTEM, 1, 2, 3], [*SYSTEM, 7, 8, 9, 9, 9], [*range(300, 309)])
    gone = simulation.prefix.invalidate(SYSTEM, None, 0, [])
    assert len(gone.block_ids[0]) >= 6 and not gone.request_keys
    simulation.scheduler.check_integrity()
    assert run(simulation, [*SYSTEM, 1, 2, 3])[0].num_cached_tokens == 0
    assert run(simulation, [*range(300, 309)])[0].num_cached_tokens == 8


def test_invalidation_of_a_partial_block():
    simulation = shared()
    run(simulation, [5, 6, 7], new=1)
    assert run(simulation, [5, 6, 7], new=1)[0].num_cached_tokens == 2
    simulation.prefix.invalidate([5, 6], None, 0, [])
    assert run(simulation, [5, 6, 7], new=1)[0].num_cached_tokens == 0


def test_running_requests_keep_what_was_invalidated_and_record_nothing_more():
    simulation = shared()
    running = simulation.add([*SYSTEM, 1], new=12)
    simulation.step()
    block = int(simulation.scheduler.batch.block_tables[0][running.row, 1])
    gone = simulation.prefix.invalidate(None, block, 0, simulation.scheduler.batch.requests)
    assert gone.request_keys == {running.key} and block in gone.block_ids[0] and len(gone.block_ids[0]) >= 3
    simulation.run()
    assert run(simulation, [*SYSTEM, 1])[0].num_cached_tokens == 4  # what lies before the block
    unknown = simulation.prefix.invalidate(None, 39, 0, [])
    assert unknown == (((),), frozenset())


def test_a_prompt_under_way_when_it_is_invalidated_is_not_found_later():
    simulation = shared(chunked_prefill_size=4)
    running = simulation.add([*SYSTEM, 1], new=2)
    simulation.step()
    gone = simulation.prefix.invalidate(SYSTEM, None, 0, simulation.scheduler.batch.requests)
    assert gone.request_keys == {running.key}
    simulation.run()
    assert run(simulation, [*SYSTEM, 1])[0].num_cached_tokens == 0


def test_reset_forgets_everything_at_once():
    simulation = shared()
    running = simulation.add([*SYSTEM, 1], new=12)
    simulation.step()
    assert simulation.prefix.reset().request_keys == {running.key}
    again = simulation.add([*SYSTEM, 1], new=2)
    simulation.run()
    assert again.num_cached_tokens == 0
    assert simulation.prefix.num_invalidated >= 4


def test_events_tell_what_can_be_found():
    simulation, chains = shared(num_blocks=12), {}

    def follow(kind, event):
        if kind == "stored":
            chains[event.block_hash] = event
            assert event.parent_hash in chains or event.parent_hash == chain_hash(0, ())
        else:
            assert kind in ("evicted", "invalidated") and chains.pop(event.block_hash) == event

    simulation.prefix.on_event = follow
    for index in range(12):
        run(simulation, [*SYSTEM[: 4 * (index % 4)], *range(200 + index, 209 + index)])
    assert simulation.prefix.num_evicted
    known = {node.hash for node in simulation.prefix.tree.nodes() if len(node.tokens) == 4}
    assert known == set(chains)
    simulation.prefix.reset()
    assert not chains


PROMPTS = st.lists(st.integers(2, 3), min_size=1, max_size=22)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(12, 40),
    st.sampled_from([(0,), (5,), (0, 6), (3, 9)]),
    st.sampled_from([constant, one_bit, chain_hash]),
    st.sampled_from([None, 1, 3, 8]),
    st.lists(
        st.tuples(PROMPTS, st.integers(1, 9), st.integers(1, 3), st.sampled_from([None, "x"]), st.integers(0, 5)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([1, 4, 1000]),
)
def test_random_traces(num_blocks, windows, hash_function, chunk, requests, looks):
    simulation = shared(
        num_blocks=num_blocks,
        windows=windows,
        hash_function=hash_function,
        chunked_prefill_size=chunk,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        looks=looks,
    )
    for prompt, new, samples, salt, steps in requests:
        made = simulation.add(prompt, new=new, samples=samples, salt=salt, eos=(2 + (new * 31) % 97,))
        for _ in range(steps):
            if simulation.scheduler.has_unfinished:
                simulation.step()
        if steps == 4:
            simulation.scheduler.finish(made, "abort")
        if steps == 5:
            simulation.prefix.invalidate(prompt[:3], None, 0, simulation.scheduler.batch.requests)
            simulation.scheduler.check_integrity()
    simulation.run()
    assert all(group.manager.available_blocks == num_blocks for group in simulation.groups)
