"""The scheduler without a model: order, budgets, chunks, preemption, windows, samples, and that nothing deadlocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import Simulation, token_of

from hf_paged.config import SchedulerConfig
from hf_paged.request import RequestStatus


def test_one_request_from_prompt_to_length():
    run = Simulation()
    request = run.add(prompt=5, new=3)
    first = run.step()
    assert [(p.start, p.count, p.is_last) for p in first.prefills] == [(0, 5, True)]
    assert len(request.output_token_ids) == 1 and request.status is RequestStatus.RUNNING
    second = run.step()
    assert (second.num_decode, second.prefills, second.num_tokens) == (1, [], 1)
    run.run()
    assert request.finish_reason == "length" and len(request.output_token_ids) == 3


def test_eos_ends_a_request():
    run = Simulation()
    request = run.add(prompt=5, new=20)
    request.eos_token_ids = (7777, token_of(request, 8))
    run.run()
    assert request.finish_reason == "eos" and len(request.output_token_ids) == 4


def test_prompts_are_chunked_and_do_not_stall_decoding():
    run = Simulation(num_blocks=40, max_num_batched_tokens=6)
    short = run.add(prompt=2, new=30)
    run.step()
    long = run.add(prompt=40, new=2)
    for step in range(8):
        output = run.step()
        assert output.num_decode == 1 and output.prefills[0].count == 5
        assert len(short.output_token_ids) == step + 2
    assert len(long.output_token_ids) == 1
    run.run()


def test_chunked_prefill_size_leaves_room_for_other_prompts():
    run = Simulation(num_blocks=40, max_num_batched_tokens=20, chunked_prefill_size=8)
    run.add(prompt=30)
    run.add(prompt=30)
    run.add(prompt=30)
    assert [prefill.count for prefill in run.step().prefills] == [8, 8, 4]
    run.run()


def test_budget_smaller_than_the_decoding_rows():
    run = Simulation(num_blocks=40, max_num_batched_tokens=3)
    requests = [run.add(prompt=1, new=5) for _ in range(6)]
    run.run()
    assert all(len(request.output_token_ids) == 5 for request in requests)


def test_fcfs_serves_in_order_of_arrival():
    run = Simulation(max_num_seqs=1)
    requests = [run.add(prompt=3, new=2) for _ in range(3)]
    run.step()
    assert [request.status for request in requests] == [RequestStatus.RUNNING] + [RequestStatus.WAITING] * 2
    run.run()
    assert requests[0].finished < requests[1].finished < requests[2].finished


def test_priority_serves_the_lower_number_first():
    run = Simulation(max_num_seqs=1, policy="priority")
    low, high = run.add(priority=5), run.add(priority=-1)
    run.run()
    assert high.finished < low.finished


def test_the_latest_of_the_lowest_priority_is_preempted_and_loses_nothing():
    run = Simulation(num_blocks=6, policy="priority", max_num_seqs=4)
    first, important, last = run.add(4, 12), run.add(4, 12, priority=-1), run.add(4, 12)
    seen, before = [], {}
    while run.scheduler.has_unfinished:
        before = {request: list(request.output_token_ids) for request in run.requests}
        output = run.step()
        seen += output.preempted
        for request in output.preempted:
            assert request.output_token_ids[: len(before[request])] == before[request]
    assert seen and seen[0] is last and important not in seen
    run.run()
    assert run.scheduler.num_preemptions == len(seen)
    assert important.finished < first.finished < last.finished


def test_a_request_that_can_never_fit_is_refused_with_the_counts():
    run = Simulation(num_blocks=4, block_size=4)
    run.add(prompt=10, new=7)  # 16 tokens are stored, the last one never is
    with pytest.raises(ValueError, match="needs 5 blocks of 4 tokens, the pool has 4"):
        run.add(prompt=10, new=8)
    with pytest.raises(ValueError, match="needs 5 blocks"):
        run.add(prompt=17, new=0)
    run.run()


def test_a_request_may_fill_the_whole_pool():
    for new in (1, 2, 3, 4):
        run = Simulation(num_blocks=5, block_size=4)
        run.add(prompt=17, new=new)
        run.run()


def test_a_window_needs_no_more_blocks_than_it_is_wide():
    run = Simulation(num_blocks=4, block_size=4, windows=(8,), max_num_batched_tokens=7)
    request = run.add(prompt=30, new=60)
    run.run()
    assert len(request.output_token_ids) == 60


def test_groups_with_and_without_a_window_keep_their_own_tables():
    run = Simulation(num_blocks=12, block_size=4, windows=(0, 6), max_num_batched_tokens=9)
    for _ in range(4):
        run.add(prompt=10, new=20)
    run.run()


def test_abort_wherever_a_request_is():
    run = Simulation(num_blocks=8, max_num_batched_tokens=4, max_num_seqs=2)
    decoding, prefilling, waiting = run.add(2, 9), run.add(12, 5), run.add(3, 3)
    run.step()
    assert decoding.output_token_ids and prefilling.row >= 0 and waiting.row < 0
    for request in (waiting, prefilling, decoding, decoding):
        run.scheduler.finish(request, "abort")
        run.scheduler.check_integrity()
    assert not run.scheduler.has_unfinished
    run.run()


def test_samples_share_the_prompts_blocks():
    run = Simulation(num_blocks=40, block_size=4, max_num_seqs=8)
    run.add(prompt=18, new=6, samples=4)
    run.step()
    assert run.groups[0].manager.used_blocks == 5 and run.scheduler.num_running == 4
    run.step()
    assert run.groups[0].manager.used_blocks == 8  # three of the four copied the block that they write
    run.run()
    texts = [request.output_token_ids for request in run.requests]
    assert len({tuple(text) for text in texts}) == 4


def test_more_samples_than_rows():
    run = Simulation(num_blocks=40, max_num_seqs=3)
    run.add(prompt=6, new=5, samples=7)
    run.add(prompt=6, new=5)
    run.run()
    assert all(len(request.output_token_ids) == 5 for request in run.requests)


def test_a_preempted_prompt_keeps_its_samples():
    run = Simulation(num_blocks=9, block_size=4, max_num_batched_tokens=8, max_num_seqs=6)
    for _ in range(3):
        run.add(prompt=9, new=12, samples=2)
    run.run()
    assert run.scheduler.num_preemptions and all(len(request.output_token_ids) == 12 for request in run.requests)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 2.5),
        ("policy", "lifo"),
        ("chunked_prefill_size", -1),
    ],
)
def test_config_refuses_wrong_values(setting, value):
    with pytest.raises(ValueError, match=setting):
        SchedulerConfig(**{setting: value})


def test_config_from_a_dict():
    assert SchedulerConfig.from_any({"max_num_seqs": 3}) == SchedulerConfig(max_num_seqs=3)
    assert SchedulerConfig.from_any(None).for_device("cpu").max_num_batched_tokens == 2048
    assert SchedulerConfig().for_device("cuda").max_num_batched_tokens == 8192
    assert SchedulerConfig(max_num_batched_tokens=7).for_device("cuda").max_num_batched_tokens == 7
    with pytest.raises(ValueError, match="scheduler_config has no setting 'max_seqs'"):
        SchedulerConfig.from_any({"max_seqs": 3})
    with pytest.raises(ValueError, match="scheduler_config must be a dict"):
        SchedulerConfig.from_any(3)


REQUEST = st.tuples(
    st.integers(1, 20), st.integers(0, 12), st.integers(-1, 1), st.sampled_from([1, 1, 1, 2, 4]), st.integers(0, 4)
)


@settings(max_examples=150)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=10),
    num_blocks=st.integers(1, 14),
    block_size=st.sampled_from([1, 3, 4]),
    windows=st.sampled_from([(0,), (5,), (0, 5), (3, 7)]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    chunk=st.sampled_from([None, 1, 5]),
    policy=st.sampled_from(["fcfs", "priority"]),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=4),
    native=st.booleans(),
    looks=st.sampled_from([1, 3, 1000]),
)
def test_nothing_deadlocks(
    requests, num_blocks, block_size, windows, max_num_seqs, budget, chunk, policy, aborts, native, looks
):
    run = Simulation(
        num_blocks,
        block_size,
        windows,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        chunked_prefill_size=chunk,
        policy=policy,
        native=native,
        looks=looks,
    )
    arrivals = sorted(requests, key=lambda request: request[4])
    step = 0
    while arrivals or run.scheduler.has_unfinished:
        while arrivals and arrivals[0][4] <= step:
            prompt, new, priority, samples, _ = arrivals.pop(0)
            try:
                run.add(prompt, new or 1, priority if policy == "priority" else 0, samples)
            except ValueError as error:
                assert "blocks" in str(error)
        for when, which in aborts:
            if when == step and which < len(run.requests):
                run.scheduler.finish(run.requests[which], "abort")
                for sample in run.requests[which].samples:
                    run.scheduler.finish(sample, "abort")
        unfinished = run.scheduler.has_unfinished
        output = run.step()
        assert output.num_tokens > 0 or not unfinished
        step += 1
        assert step < 3000
    run.run()
