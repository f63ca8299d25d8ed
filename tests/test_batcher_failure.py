"""What goes wrong: forwards that raise, callbacks that raise, interrupts, closing, memory given back."""

import gc
import signal
import threading
import time
import weakref

import psutil
import pytest
import torch
from batcher_helpers import batcher, check, check_idle, expected, greedy, in_threads
from tiny_models import build, prompts
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged import ContinuousBatcher

NAME = "llama_gqa"
ROWS = prompts((5, 17, 33, 12))


class Boom(Exception):
    """What a broken forward raises."""


@pytest.fixture
def model():
    return build(NAME)


def break_forward(model, at: int, error=Boom, times: int = 1, inside: bool = False):
    """Have forwards number `at` and on raise, `times` of them; `inside`: after the first layer wrote its K/V."""
    module = model.model.layers[1] if inside else model
    original, calls = module.forward, [0]

    def forward(*args, **kwargs):
        calls[0] += 1
        if at <= calls[0] < at + times:
            raise error(f"call {calls[0]}")
        return original(*args, **kwargs)

    module.forward = forward
    return calls


class TestForwardThatRaises:
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("at", [1, 2, 5])
    def test_a_step_can_be_tried_again(self, model, at, inside):
        with batcher(model, cache_config={"num_blocks": 30}, max_num_batched_tokens=20) as one:
            break_forward(model, at, inside=inside, times=2)
            ids = [one.add_request(row, generation_config=greedy(30)) for row in ROWS]
            failures = 0
            while one.has_work:
                try:
                    one.step()
                except Boom:
                    failures += 1
                one.check_integrity()
            assert failures == 2
            check(NAME, ROWS, [one.result(request_id) for request_id in ids], 30)
            check_idle(one)

    def test_samples_that_share_blocks_survive_it(self, model):
        with batcher(model) as one:
            request_id = one.add_request(ROWS[1], generation_config=greedy(num_return_sequences=3))
            one.step()
            break_forward(model, 1)  # before the copies of the shared last block are made
            with pytest.raises(Boom):
                one.step()
            check(NAME, [ROWS[1]] * 3, one.result(request_id))

    @pytest.mark.parametrize("max_num_seqs", [2, 8])
    def test_samples_that_were_to_begin_with_it_begin_later(self, model, max_num_seqs):
        with batcher(model, max_num_seqs=max_num_seqs) as one:
            request_id = one.add_request(ROWS[1], generation_config=greedy(num_return_sequences=4))
            break_forward(model, 1, times=2)
            for _ in range(2):
                with pytest.raises(Boom):
                    one.step()
                one.check_integrity()
            check(NAME, [ROWS[1]] * 4, one.result(request_id, timeout=60))
            check_idle(one)

    def test_generate_raises_it_and_gives_everything_back(self, model):
        with batcher(model) as one:
            break_forward(model, 3)
            with pytest.raises(Boom, match="call 3"):
                one.generate(ROWS, greedy())
            check_idle(one)
            check(NAME, ROWS, one.generate(ROWS, greedy()))

    def test_stream_raises_it(self, model):
        with batcher(model) as one:
            break_forward(model, 3)
            with pytest.raises(Boom):
                list(one.stream(ROWS, greedy()))
            check_idle(one)

    def test_every_waiting_caller_gets_it(self, model):
        with batcher(model) as one:
            break_forward(model, 4)
            barrier = threading.Barrier(3)

            def call(row):
                barrier.wait()
                return one.generate([row], greedy(30))

            started = time.perf_counter()
            results = in_threads(*(lambda row=row: call(row) for row in ROWS[:3]))
            assert time.perf_counter() - started < 20
            # Whoever came after the step that failed was served.
            assert any(isinstance(result, Boom) for result in results)
            assert all(isinstance(result, Boom | list) for result in results)
            check_idle(one)

    def test_the_background_thread_hands_it_to_waiting_and_new_callers(self, model):
        with batcher(model, cache_config={"num_blocks": 200}) as one:
            one.start()
            time.sleep(0.1)  # started before the first request
            check(NAME, ROWS[:1], one.generate(ROWS[:1], greedy()))
            break_forward(model, 60)  # when all have been added
            ids = [one.add_request(row, generation_config=greedy(100)) for row in ROWS]
            failed = time.perf_counter()
            results = in_threads(*(lambda request_id=request_id: one.result(request_id) for request_id in ids))
            assert [type(result) for result in results] == [Boom] * 4
            assert time.perf_counter() - failed < 10
            with pytest.raises(Boom):
                one.add_request(ROWS[0])
            with pytest.raises(Boom):
                one.generate(ROWS)
            check_idle(one)
            one.start()  # begins anew
            check(NAME, ROWS, one.generate(ROWS, greedy()))


class TestOneRequestsOwnFaults:
    class Bad(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 14:
                raise Boom("processor")
            return scores

    class BadCriterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 15:
                raise Boom("criterion")
            return torch.zeros(1, dtype=torch.bool)

    class BadStreamer:
        def put(self, value):
            if value.numel() == 1:
                raise Boom("streamer")

        def end(self):
            raise Boom("streamer")

    def raising(self, start, logits):
        raise Boom("prompt logits")

    def test_end_that_request_alone(self):
        faults = [
            ({"logits_processor": [self.Bad()]}, 2),
            ({"stopping_criteria": [self.BadCriterion()]}, 3),
            ({"on_prompt_logits": self.raising}, 0),
            ({"streamer": self.BadStreamer()}, 1),
            ({"logits_processor": [lambda ids, scores: scores * float("nan")]}, 0),
        ]
        with batcher(NAME, chunked_prefill_size=8, cache_config={"num_blocks": 80}) as one:
            good = [one.add_request(row, generation_config=greedy(20)) for row in ROWS]
            bad = []
            for index, (options, _) in enumerate(faults):
                config = greedy(20) if index < 4 else {"do_sample": True, "max_new_tokens": 20}
                bad.append(one.add_request(ROWS[3], generation_config=config, **options))
            for request_id, (_, tokens) in zip(bad, faults, strict=True):
                output = one.result(request_id)
                assert output.finish_reason == "error", output
                assert isinstance(output.error, Boom | RuntimeError)
                assert len(output.output_token_ids) == tokens, output
                assert list(output.output_token_ids) == expected(NAME, ROWS[3], 20)[:tokens]
            check(NAME, ROWS, [one.result(request_id) for request_id in good], 20)
            check_idle(one)

    @pytest.mark.parametrize("chunk", [8, 64])
    def test_samples_end_with_the_prompt_that_they_wait_for(self, chunk):
        config = greedy(num_return_sequences=3)
        with batcher(NAME, chunked_prefill_size=chunk, max_num_seqs=2) as one:
            request_id = one.add_request(ROWS[2], generation_config=config, on_prompt_logits=self.raising)
            outputs = one.result(request_id, timeout=60)
            assert {output.finish_reason for output in outputs} <= {"error", "length"}
            assert outputs[0].finish_reason == outputs[1].finish_reason == "error"
            check_idle(one)
            assert one.step() or not one.has_work

    def test_equal_samplers_are_told_apart(self):
        """One of several requests that are sampled together has a broken distribution."""

        def on_token(start, logits):
            logits.fill_(float("nan"))  # in place: the callback is handed the step's own logits

        config = {"do_sample": True, "max_new_tokens": 3}
        with batcher(NAME) as one:
            bad = one.add_request(ROWS[0], generation_config=config, on_prompt_logits=on_token)
            good = [one.add_request(row, generation_config=config) for row in ROWS]
            assert one.result(bad).finish_reason == "error"
            assert [one.result(request_id).finish_reason for request_id in good] == ["length"] * 4
            check_idle(one)

    def test_on_event_that_raises_is_only_logged(self):
        def on_event(kind, request_id):
            raise Boom(kind)

        with batcher(NAME, on_event=on_event) as one:
            check(NAME, ROWS, one.generate(ROWS, greedy()))

    def test_callbacks_may_add_and_abort_but_not_step(self):
        said = []

        def callback(start, logits):
            said.append(one.abort(first))
            said.append(one.add_request(ROWS[1], generation_config=greedy(3)))
            for waits in (one.step, lambda: one.result(first), lambda: one.generate(ROWS)):
                with pytest.raises(RuntimeError, match="inside a step"):
                    waits()
            one.stats()

        with batcher(NAME) as one:
            first = one.add_request(ROWS[0], generation_config=greedy(30))
            second = one.add_request(ROWS[3], generation_config=greedy(), on_prompt_logits=callback)
            check(NAME, [ROWS[3]], [one.result(second)])
            assert said[0] is True and one.result(first).finish_reason == "abort"
            check(NAME, [ROWS[1]], [one.result(said[1])], 3)
            check_idle(one)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestInterrupts:
    @pytest.mark.parametrize("at", [1, 3, 8])
    def test_ctrl_c_in_the_forward_leaves_a_usable_batcher(self, model, at):
        with batcher(model) as one:
            other = one.add_request(ROWS[0], generation_config=greedy(20))
            break_forward(model, at, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                one.generate(ROWS, greedy(20))
            one.check_integrity()
            check(NAME, [ROWS[0]], [one.result(other)], 20)
            check_idle(one)

    def test_ctrl_c_at_any_moment(self, model, ctrl_c):
        with batcher(model, cache_config={"num_blocks": 40}) as one:
            hit = 0
            for delay in (0.004, 0.011, 0.017, 0.023, 0.031, 0.043, 0.057):
                main = threading.get_ident()
                timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
                try:
                    timer.start()
                    one.generate(ROWS * 2, greedy(40, num_return_sequences=2), logprobs=1)
                    timer.join()
                    time.sleep(0.01)
                except KeyboardInterrupt:
                    hit += 1
                timer.join()
                check_idle(one)
            assert hit
            check(NAME, ROWS, one.generate(ROWS, greedy(40)), 40)

    # What is cut off, and what a request has after the step that followed.
    @pytest.mark.parametrize("where", ["schedule", "update", "begin_decode", "free_request", "append_many", "commit"])
    def test_bookkeeping_that_is_cut_off_is_made_whole(self, model, monkeypatch, where):
        from hf_paged import block_manager, running, sampler, scheduler

        owner = {
            "schedule": scheduler.Scheduler,
            "update": scheduler.Scheduler,
            "begin_decode": running.RunningBatch,
            "free_request": block_manager.BlockManager,
            "append_many": block_manager.BlockManager,
            "commit": sampler.Sampled,
        }[where]
        original, calls = getattr(owner, where), [0]

        def cut_off(*args, **kwargs):
            calls[0] += 1
            if calls[0] % 7 == 3 and calls[0] < 50:  # half-way: done, and nobody told
                original(*args, **kwargs)
                raise KeyboardInterrupt(where)
            return original(*args, **kwargs)

        with batcher(model, cache_config={"num_blocks": 26}) as one:
            monkeypatch.setattr(owner, where, cut_off)
            config = greedy(10, num_return_sequences=2)
            ids = [one.add_request(row, generation_config=config, logprobs=0) for row in ROWS]
            interrupted = 0
            for _ in range(300):
                try:
                    if not one.step() and not one.has_work:
                        break
                except KeyboardInterrupt:
                    interrupted += 1
            monkeypatch.setattr(owner, where, original)
            assert interrupted and not one.has_work
            for row, request_id in zip(ROWS, ids, strict=True):
                outputs = one.result(request_id)
                check(NAME, [row] * 2, outputs, 10)
                for output in outputs:
                    assert [told.token_id for told in output.logprobs] == list(output.output_token_ids)
            check_idle(one)


class TestTheEnd:
    def test_stop_while_busy_joins_and_the_callers_are_served(self, model):
        with batcher(model) as one:
            one.start()
            results = []
            caller = threading.Thread(target=lambda: results.append(one.generate(ROWS, greedy(40))))
            caller.start()
            time.sleep(0.05)
            started = time.perf_counter()
            one.stop()
            assert time.perf_counter() - started < 5
            caller.join(30)  # it makes the steps itself now
            check(NAME, ROWS, results[0], 40)
            one.stop()
            check_idle(one)

    def test_close_aborts_and_refuses(self, model):
        one = batcher(model)
        request_id = one.add_request(ROWS[0], generation_config=greedy())
        one.step()
        one.close()
        one.close()
        assert one.result(request_id).finish_reason == "abort"
        for call in (lambda: one.add_request(ROWS[0]), one.step, one.start, lambda: one.generate(ROWS)):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        assert one.stats().blocks_used == 0

    def test_model_and_memory_go_with_the_batcher(self):
        model = build(NAME)
        one = batcher(model)
        one.start()
        one.generate(ROWS, greedy())
        one.close()
        dies = weakref.ref(model)
        del model
        gc.collect()
        assert dies() is None

    @pytest.mark.parametrize("threaded", [False, True])
    def test_a_batcher_that_was_never_closed_goes_too(self, threaded):
        model = build(NAME)
        one = batcher(model)
        if threaded:
            one.start()
        one.generate(ROWS, greedy())
        dies, threads = weakref.ref(model), threading.active_count()
        del one, model
        for _ in range(50):
            gc.collect()
            if dies() is None:
                break
            time.sleep(0.02)
        assert dies() is None
        time.sleep(0.05)
        assert threading.active_count() <= threads

    def test_model_is_as_it_was_between_steps(self, model):
        model.train()
        before = model.config._attn_implementation
        with batcher(model) as one:
            one.add_request(ROWS[0], generation_config=greedy())
            one.step()
            assert model.training and model.config._attn_implementation == before
            one.generate(ROWS, greedy())
        assert model.training and model.config._attn_implementation == before

    def test_memory_follows_what_is_used_and_not_what_could_be(self):
        """One short request on a small model with default settings, whatever it may grow to."""
        model = build(NAME)
        eos = expected(NAME, ROWS[1])[3]
        process = psutil.Process()
        with ContinuousBatcher(model) as one:
            one.generate([ROWS[1]], greedy(eos_token_id=eos))
            gc.collect()
            before, blocks = process.memory_info().rss, one.stats().blocks_total
            assert blocks <= 2 + 1 + 8  # the blocks used, and the room to grow
            for new in (16, 256, 4096):
                for _ in range(5):
                    [output] = one.generate([ROWS[1]], greedy(new, eos_token_id=eos))
                    assert output.finish_reason == "eos"
            assert one.stats().blocks_total == blocks
            assert process.memory_info().rss - before < 8 * 2**20
