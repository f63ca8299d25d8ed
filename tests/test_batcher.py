"""The interface of a ContinuousBatcher: prompts in, snapshots out, order, stopping, statistics."""

import copy

import numpy as np
import pytest
import torch
from batcher_helpers import SMALL, batcher, check, check_idle, expected, greedy, model_of, plain
from tiny_models import build, oracle, prompts, shared
from transformers import GenerationConfig

import hf_paged
from hf_paged import ContinuousBatcher, PackingError, PagedCacheConfig, SchedulerConfig

NAME = "llama_gqa"
ROWS = prompts((5, 17, 33, 12))


class TestRequests:
    def test_step_by_step(self):
        with batcher(NAME, chunked_prefill_size=4) as one:
            request_id = one.add_request(ROWS[0], generation_config=greedy(3))
            outputs = [one.step() for _ in range(4)]
            assert [len(step) for step in outputs] == [1, 1, 1, 1]
            assert [step[0].new_token_ids for step in outputs][0] == ()  # a chunk of the prompt
            assert [len(step[0].output_token_ids) for step in outputs] == [0, 1, 2, 3]
            assert [step[0].finish_reason for step in outputs] == [None, None, None, "length"]
            assert {step[0].request_id for step in outputs} == {request_id}
            assert one.step() == []
            check_idle(one)

    def test_every_form_of_a_prompt(self):
        row = ROWS[0]
        forms = [row, tuple(row), np.array(row), torch.tensor(row), torch.tensor([row]), torch.tensor(row).int()]
        with batcher(NAME) as one:
            outputs = one.generate(forms, greedy())
            check(NAME, [row] * len(forms), outputs)

    def test_a_name_of_ones_own(self):
        with batcher(NAME) as one:
            assert one.add_request(ROWS[0], request_id="mine", generation_config=greedy(3)) == "mine"
            with pytest.raises(ValueError, match="'mine' is that of an unfinished request"):
                one.add_request(ROWS[1], request_id="mine")
            assert one.result("mine").request_id == "mine"
            one.add_request(ROWS[1], request_id="mine", generation_config=greedy(3))  # free again
            assert list(one.result("mine").prompt_token_ids) == ROWS[1]

    @pytest.mark.parametrize(
        "prompt, message",
        [
            ([], "empty prompt"),
            (torch.empty(0, dtype=torch.long), "empty prompt"),
            ([1, 199], "token id 199 is out of range, the model has 199 tokens"),
            ([1, -1], "token id -1 is out of range"),
            ([1.5, 2.0], "integers"),
            ([[1, 2], [3, 4]], "one sequence"),
            ("hello", "needs a tokenizer"),
            ([{"role": "user", "content": "hello"}], "needs a tokenizer"),
            ({"input_ids": [1]}, "mapping"),
        ],
    )
    def test_a_wrong_prompt_is_refused_and_the_others_go_on(self, prompt, message):
        with batcher(NAME) as one:
            good = one.add_request(ROWS[0], generation_config=greedy())
            one.step()
            with pytest.raises(ValueError, match=message):
                one.add_request(prompt)
            with pytest.raises(ValueError, match="prompt 1: .*" + message):
                one.generate([ROWS[1], prompt], greedy())
            check(NAME, [ROWS[0]], [one.result(good)])
            check_idle(one)

    @pytest.mark.parametrize(
        "option, message",
        [
            ({"priority": 2}, "policy='priority'"),
            ({"priority": 1.5}, "priority must be an integer"),
            ({"seed": -1}, "seed must be an integer from 0"),
            ({"logprobs": 200}, "logprobs must be an integer from 0 to 199"),
            ({"logprobs": True}, "logprobs"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"adapter_name": "a"}, "adapter_name='a'"),
            ({"cache_salt": 5}, "cache_salt"),
            ({"request_id": 5}, "request_id"),
            ({"generation_config": 5}, "generation_config"),
        ],
    )
    def test_wrong_arguments_are_refused_by_name(self, option, message):
        with batcher(NAME) as one:
            with pytest.raises((ValueError, NotImplementedError), match=message):
                one.add_request(ROWS[0], **option)
            assert one.step() == []

    def test_a_request_that_can_never_fit(self):
        with batcher(NAME, cache_config={"num_blocks": 5}) as one:
            with pytest.raises(ValueError, match="needs 6 blocks of 4 tokens, the pool has 5"):
                one.add_request(ROWS[1], generation_config=greedy(8))
            check(NAME, [ROWS[1]], one.generate([ROWS[1]], greedy(4)), 4)

    def test_positions_that_the_model_has_no_embedding_for(self):
        with batcher("gpt2", cache_config={"num_blocks": 200}) as one:
            with pytest.raises(ValueError, match="513 positions, .* has embeddings for 512"):
                one.add_request(prompts((500,))[0], generation_config=greedy(14))
            [output] = one.generate(prompts((508,)), greedy(5))
            assert len(output.output_token_ids) == 5

    def test_priorities(self):
        with batcher(NAME, policy="priority", max_num_seqs=1) as one:
            numbered = zip(ROWS, (3, 1, 2, 0), strict=True)
            ids = [one.add_request(row, generation_config=greedy(2), priority=number) for row, number in numbered]
            ended = [output.request_id for _ in range(20) for output in one.step() if output.finished]
        assert ended == [ids[3], ids[1], ids[2], ids[0]]

    def test_abort_at_every_stage(self):
        with batcher(NAME, max_num_seqs=2, chunked_prefill_size=8) as one:
            decoding = one.add_request(ROWS[0], generation_config=greedy(20))
            prefilling = one.add_request(ROWS[2], generation_config=greedy(20))
            waiting = one.add_request(ROWS[1], generation_config=greedy(20, num_return_sequences=3))
            one.step()
            arriving = one.add_request(ROWS[3], generation_config=greedy(20))
            for request_id in (arriving, waiting, prefilling, decoding):
                assert one.abort(request_id) is True
                assert one.abort(request_id) is False
                one.check_integrity()
            assert one.abort("nobody") is False
            ended = one.step()
            assert sorted({output.request_id for output in ended}) == sorted([arriving, waiting, prefilling, decoding])
            assert {output.finish_reason for output in ended} == {"abort"} and len(ended) == 6
            assert one.step() == [] and one.result(decoding).finish_reason == "abort"
            check_idle(one)


class TestGenerate:
    def test_order_and_identity_twice(self):
        rows = prompts(tuple(range(3, 27, 2)))
        with batcher(NAME, max_num_seqs=5, cache_config={"num_blocks": 30}) as one:
            check(NAME, rows, one.generate(rows, greedy()))
            check(NAME, rows[::-1], one.generate(rows[::-1], greedy()))
            check_idle(one)

    def test_settings_for_each_prompt(self):
        configs = [greedy(3), GenerationConfig(max_new_tokens=5, do_sample=False), None, greedy(repetition_penalty=1.5)]
        with batcher(NAME, generation_config=greedy(4)) as one:
            outputs = one.generate(ROWS, configs)
        assert [len(output.output_token_ids) for output in outputs] == [3, 5, 4, 12]
        assert list(outputs[3].output_token_ids) == plain(model_of(NAME), ROWS[3], **greedy(repetition_penalty=1.5))
        with batcher(NAME) as one, pytest.raises(ValueError, match="generation_config is a list of 2, there are 4"):
            one.generate(ROWS, [None, None])

    def test_nothing_to_do(self):
        with batcher(NAME) as one:
            assert one.generate([]) == [] and list(one.stream([])) == [] and one.step() == []

    def test_wrong_calls(self):
        with batcher(NAME) as one:
            with pytest.raises(ValueError, match="prompts must be a list"):
                one.generate("hello")
            with pytest.raises(ValueError, match="request_id names one request"):
                one.generate(ROWS, request_id="a")
            with pytest.raises(TypeError):
                one.generate(ROWS, nonsense=3)

    def test_progress_bar(self, capsys):
        with batcher(NAME) as one:
            one.generate(ROWS, greedy(), progress_bar=True)
        shown = capsys.readouterr()
        assert "4/4" in shown.err and "tokens/s" in shown.err and "KV" in shown.err and not shown.out


class TestEnds:
    def test_eos_as_number_list_and_none(self):
        """Rows that stop at different steps, as plain generate stops them."""
        model = model_of(NAME)
        text = expected(NAME, ROWS[0])
        for eos in (text[3], [text[3], expected(NAME, ROWS[1])[5]], None):
            with batcher(NAME) as one:
                outputs = one.generate(ROWS[:2], greedy(eos_token_id=eos))
            for row, output in zip(ROWS, outputs, strict=False):
                assert list(output.output_token_ids) == plain(model, row, **greedy(eos_token_id=eos))
                assert output.finish_reason == ("length" if len(output.output_token_ids) == 12 else "eos")

    def test_eos_of_the_model(self):
        model = build(NAME)
        model.generation_config.eos_token_id = expected(NAME, ROWS[0])[2]
        with batcher(model) as one:
            [output] = one.generate([ROWS[0]], greedy())
        assert output.finish_reason == "eos" and len(output.output_token_ids) == 3

    @pytest.mark.parametrize("new", [0, 1])
    def test_no_token_or_one_among_others(self, new):
        with batcher(NAME) as one:
            outputs = one.generate(ROWS[:2] * 2, [greedy(new), greedy(), greedy(new), greedy()])
            check_idle(one)
        assert [len(output.output_token_ids) for output in outputs] == [new, 12, new, 12]
        assert {output.finish_reason for output in outputs} == {"length"}
        check(NAME, [ROWS[1]] * 2, outputs[1::2])
        assert list(outputs[0].output_token_ids) == expected(NAME, ROWS[0])[:new]

    def test_first_token_is_eos(self):
        eos = expected(NAME, ROWS[2])[0]
        with batcher(NAME) as one:
            outputs = one.generate(ROWS, [greedy(), greedy(), greedy(eos_token_id=eos), greedy()])
            check_idle(one)
        assert outputs[2].output_token_ids == (eos,) and outputs[2].finish_reason == "eos"
        check(NAME, [ROWS[0], ROWS[1], ROWS[3]], [outputs[0], outputs[1], outputs[3]])

    def test_default_length_is_that_of_generate(self):
        with batcher(NAME) as one:
            [output] = one.generate([ROWS[0]])
        assert len(output.output_token_ids) == 20

    def test_max_length_counts_the_prompt(self):
        with batcher(NAME) as one:
            [output] = one.generate([ROWS[0]], {"max_length": 11})
            assert len(output.output_token_ids) == 6
            with pytest.raises(ValueError, match="the prompt has 12 tokens and max_length is 11"):
                one.generate([ROWS[3]], {"max_length": 11})


class TestStream:
    def test_tokens_as_they_arrive(self):
        with batcher(NAME, cache_config={"num_blocks": 24}) as one:
            outputs, copies = [], []
            for output in one.stream(ROWS, greedy()):
                outputs.append(output)
                copies.append(copy.deepcopy(output))
                assert output.output_token_ids == output.output_token_ids  # looking changes nothing
            check_idle(one)
        assert outputs == copies
        for row in ROWS:
            mine = [output for output in outputs if list(output.prompt_token_ids) == row]
            assert [token for output in mine for token in output.new_token_ids] == expected(NAME, row)
            assert all(output.new_token_ids for output in mine) and mine[-1].finished
            assert [output.finished for output in mine].count(True) == 1

    def test_leaving_early_gives_the_blocks_back(self):
        with batcher(NAME) as one:
            for output in one.stream(ROWS, greedy(40)):
                if len(output.output_token_ids) == 3:
                    break
            del output
            check_idle(one)
            check(NAME, ROWS, one.generate(ROWS, greedy()))

    def test_streamer_gets_prompt_and_tokens(self):
        class Streamer:
            def __init__(self):
                self.got, self.ended = [], 0

            def put(self, value):
                self.got.append(value)

            def end(self):
                self.ended += 1

        mine, theirs = Streamer(), Streamer()
        with batcher(NAME, cache_config={"num_blocks": 16}) as one:
            others = [one.add_request(row, generation_config=greedy(30)) for row in ROWS[:2]]
            one.result(one.add_request(ROWS[1], generation_config=greedy(), streamer=mine))
            [one.result(other) for other in others]
            with pytest.raises(ValueError, match="a streamer takes one text, num_return_sequences is 2"):
                one.add_request(ROWS[1], generation_config=greedy(num_return_sequences=2), streamer=mine)
        ids = torch.tensor([ROWS[1]])
        shared(NAME).generate(ids, attention_mask=torch.ones_like(ids), streamer=theirs, **greedy())
        assert len(mine.got) == len(theirs.got) and mine.ended == theirs.ended == 1
        assert all(torch.equal(a, b) for a, b in zip(mine.got, theirs.got, strict=True))


@pytest.fixture(scope="module")
def one(demo_model):
    model, tokenizer = demo_model
    with ContinuousBatcher(model, tokenizer=tokenizer, scheduler_config={"max_num_batched_tokens": 48}) as made:
        yield made


class TestText:
    pytestmark = [pytest.mark.demo_model]

    def test_texts_and_chats_equal_plain_generate(self, one, demo_model):
        model, tokenizer = demo_model
        chat = [{"role": "user", "content": "Name three colours."}]
        asked = ["The capital of France is", chat, "Water boils at", "1 2 3 4"]
        outputs = one.generate(asked, greedy(10))
        texts = [asked[0], tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False), *asked[2:]]
        for text, output in zip(texts, outputs, strict=True):
            ids = tokenizer(text)["input_ids"]
            assert list(output.prompt_token_ids) == ids
            want = oracle(model, ids, 10)
            assert list(output.output_token_ids) == want
            assert output.text == tokenizer.decode(want, skip_special_tokens=True)

    def test_stop_strings(self, one, demo_model):
        model, tokenizer = demo_model
        ids = tokenizer("1, 2, 3, 4,")["input_ids"]
        settings = greedy(20, stop_strings=[" 7", "zebra"])
        outputs = one.generate([ids, "Once upon a time"], [settings, greedy(20)])
        assert list(outputs[0].output_token_ids) == plain(model, ids, tokenizer=tokenizer, **settings)
        assert outputs[0].finish_reason == "stop" and outputs[0].text.endswith("7")
        assert outputs[1].finish_reason == "length"

    def test_bfloat16_samples_and_admission(self, demo_model):
        model, tokenizer = demo_model
        half = copy.deepcopy(model).to(torch.bfloat16)
        with ContinuousBatcher(half, tokenizer=tokenizer) as one:
            [output] = one.generate(["The capital of France is"], greedy(8))
        assert "Paris" in output.text


class TestSettings:
    def test_dicts_and_dataclasses(self):
        one = ContinuousBatcher(
            shared(NAME), cache_config=PagedCacheConfig(block_size=8), scheduler_config=SchedulerConfig(max_num_seqs=3)
        )
        assert (one.cache_config.block_size, one.scheduler_config.max_num_seqs) == (8, 3)
        assert one.scheduler_config.max_num_batched_tokens == 2048
        one.close()

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"cache_config": {"blocks": 3}}, "cache_config has no setting 'blocks'"),
            ({"scheduler_config": {"max_seqs": 3}}, "scheduler_config has no setting 'max_seqs'"),
            ({"generation_config": {"num_beams": 4}}, "beam_search"),
            ({"generation_config": {"temprature": 4}}, "temprature"),
            ({"compile": "nonsense"}, "compile must be True, False or a backend of torch.compile"),
        ],
    )
    def test_wrong_ones_are_refused(self, settings, message):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            ContinuousBatcher(shared(NAME), **settings)

    def test_a_pool_that_does_not_fit_the_memory(self):
        with pytest.raises(RuntimeError, match="memory_fraction"):
            ContinuousBatcher(shared(NAME), cache_config={"num_blocks": 10**7})

    def test_packing_error_is_public(self):
        assert issubclass(PackingError, NotImplementedError) and hf_paged.PackingError is PackingError


class TestStats:
    def test_figures(self):
        with batcher(NAME, max_num_seqs=4) as one:
            empty = one.stats()
            assert (empty.steps, empty.utilization, empty.waste, empty.preemptions) == (0, 0.0, 0.0, 0)
            ids = [one.add_request(row, generation_config=greedy()) for row in ROWS]
            one.add_request(ROWS[0], generation_config=greedy())
            one.step()
            stats = one.stats()
            assert (stats.blocks_total, stats.running, stats.waiting) == (60, 4, 1)
            assert stats.blocks_used == 2 + 5 + 9 + 3 and stats.utilization == 19 / 60
            assert stats.waste == pytest.approx(1 - (5 + 17 + 33 + 12) / (19 * 4))
            assert (stats.steps, stats.new_tokens, stats.prompt_tokens) == (1, 4, 67 - 4)
            assert stats.batch_occupancy == 1.0 and stats.blocks_limit == 60
            assert stats.bytes_total == 60 * 4 * 2 * 2 * 16 * 4 * 3
            [one.result(request_id) for request_id in ids]
            stats = one.stats()
            assert stats.bookkeeping_us > 0 and stats.tokens_per_second > 0
            assert min(stats.schedule_seconds, stats.forward_seconds, stats.sample_seconds) > 0
        assert one.stats().running == 0  # still there after close

    def test_events(self):
        events = []
        with batcher(NAME, cache_config={"num_blocks": 14}, on_event=lambda *event: events.append(event)) as one:
            rows = prompts((6,) * 4)
            one.generate(rows, greedy(40))
            preemptions = one.stats().preemptions
        kinds = [kind for kind, _ in events]
        assert kinds.count("added") == kinds.count("finished") == 4 and kinds.count("preempted") == preemptions > 0
        assert len({subject for kind, subject in events if not kind.startswith("block_")}) == 4

    def test_timings(self):
        with batcher(NAME) as one:
            [output] = one.generate([ROWS[0]], greedy(5))
        timings = output.timings
        assert 0 <= timings.queued <= timings.time_to_first_token
        assert timings.time_per_token > 0 and timings.num_tokens == 5
        assert timings.arrival < timings.first_token < timings.last_token <= timings.finished


def test_it_grows_on_demand_and_names_what_is_there():
    with batcher(NAME, cache_config={"num_blocks": None, "block_size": 16}) as one:
        assert one.stats().blocks_total == 0 and one.stats().blocks_limit > 1000
        check(NAME, ROWS, one.generate(ROWS, greedy()))
        assert 8 <= one.stats().blocks_total <= 40
        check_idle(one)


def test_window_layers_give_blocks_back_behind_the_window():
    with batcher("mistral_swa", cache_config={"num_blocks": 6, "block_size": 4}) as one:
        check("mistral_swa", [ROWS[2]], one.generate([ROWS[2]], greedy(40)), 40)
    assert SMALL["block_size"] == 4
