"""Steps of decoding in C: the arrays say afterwards what numpy and the block manager would have made of them."""

import collections
from contextlib import contextmanager

import numpy as np
import pytest
from batcher_helpers import batcher, expected, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import Simulation

import hf_paged_kernels.cpu.decode_rows as decode_rows
from hf_paged import running
from hf_paged.block_manager import BlockManager
from hf_paged.blocks_ahead import FEWEST
from hf_paged.cache_group import CacheGroup
from hf_paged.config import SchedulerConfig
from hf_paged.request import Request
from hf_paged.running import RECENT_STEPS, RunningBatch
from hf_paged.scheduler import Scheduler
from hf_paged_kernels import DecodeRows

needs_c = pytest.mark.skipif(not DecodeRows.available(1), reason="the C library was not built")
pytestmark = needs_c


def state(simulation):
    """Everything that a forward reads of the rows in use, and what the requests have got; asks no manager."""
    batch = simulation.scheduler.batch
    rows, decoding = slice(0, batch.num_rows), slice(0, batch.num_decode)
    arrays = [batch.num_computed[rows], batch.num_tokens[rows], batch.last_token[rows], batch.seq_lens[decoding]]
    for index, table in enumerate(batch.block_tables):
        needs_block = batch.num_computed[decoding] >= batch.covered[index][decoding]
        arrays += [table[rows], batch.covered[index][rows], np.where(needs_block, -1, batch.slots[index][decoding])]
    return [request.key for request in batch.requests], [array.tolist() for array in arrays]


REQUEST = st.tuples(st.integers(1, 20), st.integers(1, 60), st.sampled_from([1, 1, 1, 3]), st.integers(0, 30))


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    num_blocks=st.integers(8, 60),
    block_size=st.sampled_from([1, 3, 4]),
    windows=st.sampled_from([(0,), (5,), (0, 0), (0, 5)]),
    share=st.booleans(),
    eos=st.sampled_from([(), (40,), (41, 7, 12)]),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=3),
    config=st.fixed_dictionaries({"max_num_seqs": st.integers(1, 6), "max_num_batched_tokens": st.integers(2, 24)}),
)
def test_both_ways_do_the_same(requests, num_blocks, block_size, windows, share, eos, aborts, config):
    """In C, the managers asked at the very end, and in numpy, everything checked in each step."""
    runs = [
        Simulation(num_blocks, block_size, windows, share, native=True, looks=10**9, **config),
        Simulation(num_blocks, block_size, windows, share, native=False, **config),
    ]
    waiting = sorted(requests, key=lambda request: request[3])
    for step in range(400):
        while waiting and waiting[0][3] <= step:
            prompt, new, samples, _ = waiting.pop(0)
            for run in runs:
                try:
                    run.add(prompt, new, samples=samples, eos=eos)
                except ValueError as error:
                    assert "blocks" in str(error)
        for when, which in aborts:
            if when == step:
                for run in runs:
                    for request in run.requests[which : which + 1]:
                        run.scheduler.finish(request, "abort")
        if not waiting and not runs[0].scheduler.has_unfinished:
            break
        for run in runs:
            run.step()
        assert state(runs[0]) == state(runs[1])
    for run in runs:
        run.run()
    first, second = ([(one.finish_reason, one.output_token_ids) for one in run.requests] for run in runs)
    assert first == second


def steady(count=6, block_size=4, num_blocks=400, new=100, **options):
    """Requests that decode, and what was computed for each of them so far."""
    run = Simulation(num_blocks, block_size, max_num_seqs=count, looks=10**9, **options)
    for index in range(count):
        run.add(3 + index, new)
    for _ in range(3):
        run.step()
    return run


def counting(monkeypatch):
    """How many blocks each call handed to rows."""
    calls, own = [], BlockManager.append_blocks

    def append_blocks(self, request_ids):
        calls.append(len(request_ids))
        return own(self, request_ids)

    monkeypatch.setattr(BlockManager, "append_blocks", append_blocks)
    return calls


def test_steady_decode_asks_the_manager_seldom(monkeypatch):
    calls, run = counting(monkeypatch), steady(new=210)
    for _ in range(200):
        run.step()
    assert len(calls) < 200 * 6 / 4 / 10 and max(calls) > 50  # blocks were needed in nearly every step
    run.scheduler.check_integrity()
    assert sum(calls) == run.groups[0].manager.used_blocks - 10  # of the prompts: 1, 1, 2, 2, 2 and 2


def test_where_somebody_asks_in_every_step_little_is_offered(monkeypatch):
    calls, run = counting(monkeypatch), steady()
    group = run.groups[0]
    for _ in range(50):
        run.step()
        assert group.ahead._rows.num_next <= FEWEST
        held = group.manager.used_blocks
        batch = run.scheduler.batch
        assert held == sum(-(-int(covered) // 4) for covered in batch.covered[0][:6])
    assert max(calls) <= 6


def test_no_more_is_offered_than_is_free_and_nothing_is_evicted():
    run = steady(num_blocks=90)
    group = run.groups[0]
    evicted = []
    group.manager.pool.on_evict = evicted.append
    for block in range(20):  # as blocks that somebody may find again
        group.manager.allocate_request(f"cached {block}", 4)
        group.manager.pool.keep(group.manager.block_table_view(f"cached {block}")[0])
        group.manager.free_request(f"cached {block}")
    offers, own = [], group.ahead.offer

    def offer(manager, num_blocks):
        group.ahead.settle(manager)
        free = manager.available_blocks - manager.pool.cached_blocks
        own(manager, num_blocks)
        offers.append((group.ahead._rows.num_next, free))

    group.ahead.offer = offer
    while len(run.scheduler.batch.block_tables[0][run.scheduler.batch.block_tables[0] >= 0]) < 65:
        run.step()
        assert not evicted
    assert all(offered <= free for offered, free in offers) and any(offered == free for offered, free in offers)
    while not evicted and not run.scheduler.num_preemptions:
        run.step()
    assert evicted and not run.scheduler.num_preemptions
    run.run()


def test_requests_get_their_tokens_when_somebody_asks():
    run = steady()
    request = run.requests[2]
    known = len(request.output_token_ids)
    for step in range(RECENT_STEPS + 5):
        run.step()
        if step < RECENT_STEPS:
            assert len(request.noted_token_ids) == known
    assert len(request.noted_token_ids) == known + RECENT_STEPS
    assert request.num_tokens == run.scheduler.batch.num_tokens[request.row]
    assert len(request.noted_token_ids) == known + RECENT_STEPS + 5
    run.scheduler.finish(run.requests[0], "abort")
    run.step()
    run.run()


class Interrupting(list):
    """A list that does not take what is added the first time."""

    armed = True

    def extend(self, values):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().extend(values)


def test_handing_out_tokens_can_be_cut_off_and_begun_again():
    run = steady()
    for _ in range(7):
        run.step()
    batch = run.scheduler.batch
    batch.outputs[3] = batch.requests[3].noted_token_ids = Interrupting(batch.requests[3].noted_token_ids)
    with pytest.raises(KeyboardInterrupt):
        _ = run.requests[0].output_token_ids
    run.step()
    run.run()  # compares every token


def test_handing_out_one_step_that_is_cut_off_at_its_end(monkeypatch):
    """Every request has its token, and the batch does not know yet."""
    run = steady()
    _ = run.requests[0].output_token_ids
    run.step()
    batch = run.scheduler.batch
    assert batch.num_recent == 1

    def cut_off(*args, **kwargs):
        collections.deque(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running, "deque", cut_off)
        _ = run.requests[0].output_token_ids
    assert batch.num_recent == 1 and len(batch.outputs[0]) == batch.num_tokens[0] - 3
    for _ in range(3):
        run.step()
        assert run.requests[1].num_tokens == batch.num_tokens[run.requests[1].row]
    run.run()


@contextmanager
def counting_is_cut_off(monkeypatch):
    """Ctrl-C comes when a manager has counted the first of the blocks that rows took."""
    own = BlockManager.append_blocks

    def append_blocks(self, request_ids):
        own(self, request_ids[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockManager, "append_blocks", append_blocks)
        yield


def test_counting_blocks_that_is_cut_off(monkeypatch):
    """As the engine recovers: everything is computed again from blocks that are all free."""
    run = steady()
    for _ in range(9):
        run.step()
    with counting_is_cut_off(monkeypatch):
        _ = run.groups[0].manager
    run.scheduler.recover(run.requests)
    run.stored.clear()
    assert run.groups[0].manager.used_blocks == 0
    run.run()


@pytest.mark.parametrize("what", ["tables", "ends"])
def test_making_an_array_larger_that_is_cut_off(what, monkeypatch):
    """Afterwards C must not read and write the old one."""
    run = steady(count=3, block_size=2)
    own = RunningBatch._bind

    def cut_off(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunningBatch, "_bind", cut_off)
        if what == "ends":
            run.add(3, 4, eos=(50, 60, 70))
            run.scheduler.finish(run.requests[0], "abort")
        for _ in range(100):
            run.step()
    assert RunningBatch._bind is own
    run.scheduler.recover([request for request in run.requests if not request.is_finished])
    run.stored.clear()
    batch = run.scheduler.batch
    rows, group = batch.native._rows, batch.native.groups[0]
    assert (group.tables, group.columns) == (batch.block_tables[0].ctypes.data, batch.block_tables[0].shape[1])
    assert (rows.eos, rows.eos_columns) == (batch.eos.ctypes.data, batch.eos.shape[1])
    run.run()


def test_a_pool_that_somebody_else_uses_is_noticed():
    run = steady()
    own = run.groups[0].manager
    for _ in range(20):  # until something was offered and taken
        run.step()
    own.pool.allocate()  # not by way of the group
    with pytest.raises(AssertionError, match="rows took blocks"):
        for _ in range(3):
            run.step()
            _ = run.groups[0].manager


def test_tables_that_become_wider_and_requests_with_more_ends_are_followed():
    run = steady(count=3, block_size=1, num_blocks=1000)
    width = run.scheduler.batch.block_tables[0].shape[1]
    ends = run.add(4, 100, eos=(3, 9, 50, 60))
    run.run()
    assert run.scheduler.batch.block_tables[0].shape[1] > 4 * width
    assert ends.finish_reason == "eos"


def test_there_are_none_without_the_library_or_for_too_many_groups(monkeypatch):
    assert DecodeRows.available(decode_rows.MAX_GROUPS) and not DecodeRows.available(decode_rows.MAX_GROUPS + 1)
    decode_rows._entries.cache_clear()
    monkeypatch.setattr(decode_rows, "load", lambda: (None, "not built"))
    try:
        assert not DecodeRows.available(1)
    finally:
        monkeypatch.undo()
        decode_rows._entries.cache_clear()
    groups = [CacheGroup(BlockManager(50, 4), 0) for _ in range(decode_rows.MAX_GROUPS)]
    scheduler = Scheduler(groups, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16), None, DecodeRows)
    scheduler.add(Request("many groups", range(2, 9), key=1, max_tokens=60))
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        tokens = [5] * (output.num_decode + sum(prefill.is_last for prefill in output.prefills))
        for request in scheduler.update(output, tokens, {}):
            scheduler.finish(request, "length")
        assert {group.manager.used_blocks for group in groups} in ({0}, {groups[0].manager.used_blocks})


def test_arrays_that_do_not_fit_are_refused():
    rows = decode_rows.GroupRows()
    with pytest.raises(AssertionError, match="tables"):
        rows.point(tables=np.zeros((2, 4), np.int64))
    with pytest.raises(AssertionError, match="slots"):
        rows.point(slots=np.zeros((4, 2), np.int64)[:, 0])


def test_ctrl_c_while_a_prefix_is_dropped(monkeypatch):
    """Looking a block up makes the manager count; cut off, all is computed again."""
    with batcher("llama_gqa", cache_config={"block_size": 4, "num_blocks": 200}, max_num_seqs=4) as one:
        prompts = [[5 + index, 7, 9] for index in range(3)]
        ids = [one.add_request(prompt, generation_config=greedy(60)) for prompt in prompts]
        for _ in range(30):
            one.step()
        with counting_is_cut_off(monkeypatch):
            one.invalidate_prefix(block_id=150)
        one.check_integrity()
        for prompt, request in zip(prompts, ids, strict=True):
            assert list(one.result(request).output_token_ids) == expected("llama_gqa", prompt, 60)
