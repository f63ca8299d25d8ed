"""Many callers at once: threads, the background thread, asyncio."""

import asyncio
import threading
import time

import pytest
from batcher_helpers import batcher, check, check_idle, expected, greedy, in_threads
from tiny_models import build, prompts

NAME = "llama_gqa"
ROWS = prompts((5, 17, 33, 12))


@pytest.mark.parametrize("background", [False, True])
class TestThreads:
    def test_concurrent_calls_join_one_batch(self, background):
        with batcher(NAME, cache_config={"num_blocks": 120}) as one:
            if background:
                one.start()
            calls = [prompts((5, 9, 17), seed) for seed in range(8)]
            barrier = threading.Barrier(8)

            def call(rows):
                barrier.wait()
                return one.generate(rows, greedy())

            results = in_threads(*(lambda rows=rows: call(rows) for rows in calls))
            for rows, outputs in zip(calls, results, strict=True):
                check(NAME, rows, outputs)
            stats = one.stats()
            assert stats.steps < 8 * 13  # fewer than one call after the other
            check_idle(one)

    def test_results_by_name_in_reverse_order(self, background):
        with batcher(NAME, max_num_seqs=4) as one:
            if background:
                one.start()

            def call(seed):
                rows = prompts((5, 17, 12, 9, 8, 3), seed)
                ids = [one.add_request(row, generation_config=greedy()) for row in rows]
                return rows, [one.result(request_id) for request_id in ids[::-1]][::-1]

            for rows, outputs in in_threads(lambda: call(1), lambda: call(2)):
                check(NAME, rows, outputs)
            check_idle(one)

    def test_streams_side_by_side(self, background):
        with batcher(NAME) as one:
            if background:
                one.start()

            def call(row):
                return [token for output in one.stream([row], greedy()) for token in output.new_token_ids]

            results = in_threads(*(lambda row=row: call(row) for row in ROWS))
            assert results == [expected(NAME, row) for row in ROWS]
            check_idle(one)

    def test_waiting_has_a_limit(self, background):
        with batcher(NAME, cache_config={"num_blocks": 400}) as one:
            request_id = one.add_request(ROWS[0], generation_config=greedy(1000))
            if background:
                one.start()
            with pytest.raises(TimeoutError, match="has not ended after 0.05 seconds"):
                one.result(request_id, timeout=0.05)
            one.abort(request_id)
            assert one.result(request_id, timeout=5).finish_reason == "abort"
            with pytest.raises(ValueError, match="unknown request 'nobody'"):
                one.result("nobody")

    def test_abort_from_another_thread(self, background):
        with batcher(NAME, cache_config={"num_blocks": 400}) as one:
            if background:
                one.start()
            request_id = one.add_request(ROWS[0], generation_config=greedy(1000))
            threading.Timer(0.1, one.abort, (request_id,)).start()
            output = one.result(request_id, timeout=30)
            assert output.finish_reason == "abort" and 0 < len(output.output_token_ids) < 1000
            check_idle(one)


def test_requests_that_come_while_a_call_runs_are_served_by_it():
    with batcher(NAME) as one:
        seen = []
        for output in one.stream([ROWS[1]], greedy(20)):
            if len(output.output_token_ids) == 2:
                seen.append(one.add_request(ROWS[0], generation_config=greedy(5)))
        stats = one.stats()
        [late] = [output for output in one.step() if output.request_id == seen[0]]
        assert one.stats().steps == stats.steps  # nothing was left to do, and its outcome is reported once
        check(NAME, [ROWS[0]], [late], 5)
        assert one.step() == []


def test_a_background_thread_that_idles_uses_no_time():
    with batcher(NAME) as one:
        one.start()
        one.start()  # changes nothing
        one.generate(ROWS, greedy())
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_results_are_kept_for_a_bounded_number_of_requests(monkeypatch):
    monkeypatch.setattr("hf_paged.batcher_core.MAX_KEPT", 5)
    with batcher(NAME) as one:
        ids = [one.add_request([5], generation_config=greedy(1)) for _ in range(12)]
        while one.has_work:
            one.step()
        assert one.result(ids[-1]).finished and len(one._requests) == 5
        with pytest.raises(ValueError, match="unknown request"):
            one.result(ids[0])
        one.generate(ROWS, greedy(2))
        assert len(one._requests) == 5


class TestAsyncio:
    def test_many_tasks_at_once(self):
        async def main(one):
            calls = [prompts((5, 9), seed) for seed in range(10)]
            results = await asyncio.gather(*(one.agenerate(rows, greedy()) for rows in calls))
            for rows, outputs in zip(calls, results, strict=True):
                check(NAME, rows, outputs)

        with batcher(NAME, cache_config={"num_blocks": 120}) as one:
            asyncio.run(main(one))
            assert one.stats().steps < 100
            check_idle(one)

    def test_astream(self):
        async def read(one, row):
            return [token async for output in one.astream([row], greedy()) for token in output.new_token_ids]

        async def main(one):
            return await asyncio.gather(*(read(one, row) for row in ROWS))

        with batcher(NAME) as one:
            assert asyncio.run(main(one)) == [expected(NAME, row) for row in ROWS]
            check_idle(one)

    def test_a_cancelled_task_aborts(self):
        async def main(one):
            task = asyncio.create_task(one.agenerate(ROWS, greedy(1000)))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await one.agenerate(ROWS, greedy())

        with batcher(NAME, cache_config={"num_blocks": 1200}) as one:
            check(NAME, ROWS, asyncio.run(main(one)))
            check_idle(one)

    def test_a_bad_prompt_is_refused(self):
        with batcher(NAME) as one, pytest.raises(ValueError, match="prompt 1: an empty prompt"):
            asyncio.run(one.agenerate([ROWS[0], []]))

    def test_a_forward_that_raises(self):
        model = build(NAME)

        def forward(*args, **kwargs):
            raise RuntimeError("broken")

        with batcher(model) as one:
            model.forward = forward
            with pytest.raises(RuntimeError, match="broken"):
                asyncio.run(one.agenerate(ROWS, greedy()))
            check_idle(one)

    def test_stop_ends_calls_that_cannot_go_on_alone(self):
        async def main(one):
            task = asyncio.create_task(one.agenerate(ROWS, greedy(1000)))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(one.stop)
            return await asyncio.wait_for(task, 10)

        with batcher(NAME, cache_config={"num_blocks": 1200}) as one:
            assert {output.finish_reason for output in asyncio.run(main(one))} == {"abort"}
            check_idle(one)
