"""How tokens are chosen: settings and processors of each request, seeds, samples of one prompt, log-probabilities."""

import pytest
import torch
from batcher_helpers import batcher, check_idle, greedy, model_of, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, build, prompts
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.generation import PrefixConstrainedLogitsProcessor

from hf_paged.sampling import SamplingTemplate

NAME = "llama_gqa"
ROWS = prompts((5, 17, 33, 12))
EOS = 77  # no token that these models know of


class NoRepeats(LogitsProcessor):
    """A user's processor that reads the whole history."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0]] -= 3.0
        return scores


class AfterThreeEven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([int((input_ids[0, -3:] % 2 == 0).sum()) == 3])


# name -> settings of the generation config, and further arguments of generate
OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [17, 30], [60, 61, 62]]},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(3, 120))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(3, 120))},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[11, 12], -2.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 150))},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 5},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")},
    "guidance": {"guidance_scale": 1.7},
    "processor": {"logits_processor": [NoRepeats()]},
    "criterion": {"stopping_criteria": [AfterThreeEven()]},
    "max_length_criterion": {"stopping_criteria": [MaxLengthCriteria(30)], "max_new_tokens": None},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1]) // 2 + 3, 9, 40]},
    "eos_list": {"eos_token_id": list(range(3, 30))},
    "plain": {},
}


def both_forms(settings):
    """The settings of plain generate, and what a batcher is given instead."""
    theirs = {**greedy(20), **settings}
    config = {name: value for name, value in theirs.items() if name not in NOT_CONFIG}
    others = {name: theirs[name] for name in ("logits_processor", "stopping_criteria") if name in theirs}
    if "prefix_allowed_tokens_fn" in theirs:
        others["logits_processor"] = [PrefixConstrainedLogitsProcessor(theirs["prefix_allowed_tokens_fn"], 1)]
    return theirs, {"generation_config": config, **others}


NOT_CONFIG = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone_in_a_batch(option):
    theirs, mine = both_forms(OPTIONS[option])
    model = model_of(NAME)
    with batcher(NAME, cache_config={"num_blocks": 32}, chunked_prefill_size=6) as one:
        ids = [one.add_request(row, **mine) for row in ROWS]
        for row, request_id in zip(ROWS, ids, strict=True):
            assert list(one.result(request_id).output_token_ids) == plain(model, row, **theirs)
        check_idle(one)


def test_all_options_mixed_in_one_batch_under_preemption():
    model = model_of(NAME)
    with batcher(NAME, cache_config={"num_blocks": 40}, max_num_batched_tokens=30) as one:
        ids = {}
        for index, (option, settings) in enumerate(OPTIONS.items()):
            ids[option] = (index % 4, one.add_request(ROWS[index % 4], **both_forms(settings)[1]))
        for option, (row, request_id) in ids.items():
            output = one.result(request_id)
            assert output.error is None
            assert list(output.output_token_ids) == plain(model, ROWS[row], **both_forms(OPTIONS[option])[0]), option
        assert one.stats().preemptions
        check_idle(one)


SAMPLED = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.5, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.01, "top_k": 0},
    "penalty": {"repetition_penalty": 1.5, "temperature": 1.3},
    "renormalize": {"renormalize_logits": True, "temperature": 0.5},
}


@pytest.mark.parametrize("option", SAMPLED)
def test_a_lone_unseeded_sample_is_the_one_of_generate(option):
    settings = {"do_sample": True, "max_new_tokens": 12, **SAMPLED[option]}
    with batcher(NAME) as one:
        torch.manual_seed(5)
        want = plain(model_of(NAME), ROWS[1], **settings)
        torch.manual_seed(5)
        [output] = one.generate([ROWS[1]], settings)
    assert list(output.output_token_ids) == want


def seeded(index: int) -> dict:
    """A prompt, and settings of its own for it."""
    name = list(SAMPLED)[index % len(SAMPLED)]
    config = {"do_sample": True, "max_new_tokens": 10, **SAMPLED[name]}
    return {"generation_config": config, "seed": 100 + index}


@pytest.fixture(scope="module")
def alone():
    """Each seeded request by itself."""
    with batcher(NAME) as one:
        return [one.result(one.add_request(ROWS[index % 4], **seeded(index))).output_token_ids for index in range(12)]


@settings(max_examples=12)
@given(
    order=st.permutations(range(12)),
    num_blocks=st.integers(14, 40),
    chunk=st.integers(1, 40),
    seqs=st.integers(1, 12),
    late=st.integers(0, 12),
)
def test_a_seeded_sample_depends_on_nothing_else(alone, order, num_blocks, chunk, seqs, late):
    with batcher(NAME, cache_config={"num_blocks": num_blocks}, max_num_batched_tokens=chunk, max_num_seqs=seqs) as one:
        ids = {index: one.add_request(ROWS[index % 4], **seeded(index)) for index in order[:late]}
        for _ in range(5):
            one.step()
        ids.update({index: one.add_request(ROWS[index % 4], **seeded(index)) for index in order[late:]})
        torch.manual_seed(chunk)
        for index, request_id in ids.items():
            assert one.result(request_id).output_token_ids == alone[index]


def test_seeds_differ_and_repeat():
    config = {"do_sample": True, "max_new_tokens": 10, "top_k": 0}
    with batcher(NAME) as one:
        outputs = one.generate([ROWS[0]] * 4, config, seed=[1, 2, 1, None])
        texts = [output.output_token_ids for output in outputs]
    assert texts[0] == texts[2] and len(set(texts)) == 3


class TestSamplesOfOnePrompt:
    def test_shape_order_and_shared_blocks(self):
        config = {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 4, "top_k": 0}
        with batcher(NAME, cache_config={"block_size": 16, "num_blocks": 30}) as one:
            request_id = one.add_request(ROWS[1], generation_config=config)
            other = one.add_request(ROWS[2], generation_config=greedy(6))
            one.step()
            assert one.stats().blocks_used == 2 + 3  # 17 and 33 tokens
            outputs = one.result(request_id)
            assert [output.index for output in outputs] == [0, 1, 2, 3]
            assert {output.request_id for output in outputs} == {request_id}
            assert all(len(output.output_token_ids) == 6 for output in outputs)
            assert len({output.output_token_ids for output in outputs}) > 1
            assert list(one.result(other).output_token_ids) == plain(model_of(NAME), ROWS[2], **greedy(6))
            check_idle(one)

    def test_consecutive_in_generate(self):
        config = {"do_sample": True, "max_new_tokens": 4, "num_return_sequences": 3}
        with batcher(NAME, max_num_seqs=5) as one:
            outputs = one.generate(ROWS, config)
        assert [list(output.prompt_token_ids) for output in outputs] == [row for row in ROWS for _ in range(3)]
        assert [output.index for output in outputs] == [0, 1, 2] * 4

    def test_greedy_samples_are_equal(self):
        with batcher(NAME) as one:
            outputs = one.generate([ROWS[2]], greedy(num_return_sequences=4))
        assert [list(output.output_token_ids) for output in outputs] == [plain(model_of(NAME), ROWS[2], **greedy())] * 4

    def test_each_has_the_seed_of_its_number(self):
        config = {"do_sample": True, "max_new_tokens": 8, "top_k": 0}
        with batcher(NAME, cache_config={"num_blocks": 20}) as one:
            together = one.generate([ROWS[1]], {**config, "num_return_sequences": 4}, seed=20)
            for index, output in enumerate(together):
                assert [output.output_token_ids] == [
                    o.output_token_ids for o in one.generate([ROWS[1]], config, seed=20 + index)
                ]

    def test_first_tokens_follow_the_distribution(self):
        """Chi-square over 200 seeds and 4 samples, against softmax of the model's own logits."""
        model = model_of(NAME)
        with torch.no_grad():
            want = (model(torch.tensor([ROWS[1]])).logits[0, -1] / 4.0).softmax(-1)
        config = {"do_sample": True, "max_new_tokens": 1, "num_return_sequences": 4, "temperature": 4.0, "top_k": 0}
        with batcher(NAME, max_num_seqs=64) as one:
            outputs = one.generate([ROWS[1]] * 200, config, seed=[10 * index for index in range(200)])
        counts = torch.bincount(torch.tensor([output.output_token_ids[0] for output in outputs]), minlength=VOCAB)
        order = want.argsort(descending=True)
        bins = [order[:1], order[1:3], order[3:8], order[8:20], order[20:60], order[60:]]
        expected = torch.tensor([float(want[index].sum()) * 800 for index in bins])
        found = torch.tensor([float(counts[index].sum()) for index in bins])
        chi_square = float(((found - expected).square() / expected.clamp(min=1e-9)).sum())
        assert expected.min() > 5
        assert chi_square < 20.52  # p = 0.001 with 5 degrees of freedom

    def test_settings_of_the_call_win_over_the_models(self):
        model = build(NAME)
        model.generation_config.temperature, model.generation_config.do_sample = 0.01, True
        with batcher(model) as one:
            cold = one.generate([ROWS[0]] * 6, {"max_new_tokens": 5})
            warm = one.generate([ROWS[0]] * 6, {"max_new_tokens": 5, "temperature": 3.0})
        assert len({output.output_token_ids for output in cold}) == 1
        assert len({output.output_token_ids for output in warm}) > 1


class TestLogprobs:
    def test_of_tokens_and_prompt(self):
        model = model_of(NAME)
        with batcher(NAME, chunked_prefill_size=7, cache_config={"num_blocks": 14}) as one:
            others = [one.add_request(row, generation_config=greedy(20)) for row in ROWS[:2]]
            request_id = one.add_request(ROWS[3], generation_config=greedy(9), logprobs=3, prompt_logprobs=2)
            output = one.result(request_id)
            [one.result(other) for other in others]
        with torch.no_grad():
            rows = model(torch.tensor([[*ROWS[3], *output.output_token_ids]])).logits[0].log_softmax(-1)
        assert len(output.logprobs) == 9 and len(output.prompt_logprobs) == 12
        assert output.prompt_logprobs[0] is None
        told = [*output.prompt_logprobs[1:], *output.logprobs]
        tokens = [*ROWS[3], *output.output_token_ids][1:]
        for position, (one_told, token) in enumerate(zip(told, tokens, strict=True)):
            count = 2 if position < 11 else 3
            values, best = rows[position].topk(count)
            assert one_told.token_id == token and [t for t, _ in one_told.top] == best.tolist()
            assert one_told.logprob == pytest.approx(float(rows[position, token]), abs=1e-3)
            assert [value for _, value in one_told.top] == pytest.approx(values.tolist(), abs=1e-3)

    def test_without_the_most_likely_ones(self):
        with batcher(NAME) as one:
            [output] = one.generate([ROWS[0]], greedy(3), logprobs=0)
        assert [told.top for told in output.logprobs] == [()] * 3 and output.prompt_logprobs is None

    def test_the_sampled_token_of_a_seeded_request_is_unchanged(self):
        config = {"do_sample": True, "max_new_tokens": 8}
        with batcher(NAME) as one:
            told, bare = one.generate([ROWS[0]] * 2, config, seed=3, logprobs=[5, None])
        assert told.output_token_ids == bare.output_token_ids
        assert [one_told.token_id for one_told in told.logprobs] == list(told.output_token_ids)

    def test_prompt_logits_come_once_for_each_position(self):
        got = []
        model = model_of(NAME)
        with batcher(NAME, chunked_prefill_size=10, cache_config={"num_blocks": 18}) as one:
            for row in ROWS[:3]:
                one.add_request(row, generation_config=greedy(30))
            request_id = one.add_request(
                ROWS[2],
                generation_config=greedy(5),
                on_prompt_logits=lambda start, logits: got.append((start, logits.clone())),
            )
            output = one.result(request_id)
        with torch.no_grad():
            want = model(torch.tensor([ROWS[2]])).logits[0]
        assert [start for start, _ in got] == [sum(len(part) for _, part in got[:i]) for i in range(len(got))]
        torch.testing.assert_close(torch.cat([part for _, part in got]), want, rtol=1e-3, atol=1e-3)
        assert list(output.output_token_ids) == plain(model, ROWS[2], **greedy(5))

    def test_a_prompt_can_be_scored_alone(self):
        with batcher(NAME) as one:
            [output] = one.generate([ROWS[1]], {"max_new_tokens": 0}, prompt_logprobs=0)
            check_idle(one)
        assert output.output_token_ids == () and len(output.prompt_logprobs) == 17
        assert output.finish_reason == "length"

    def test_scores_and_logits_as_generate_returns_them(self):
        told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        settings = greedy(6, repetition_penalty=1.4, **told)
        ids = torch.tensor([ROWS[0]])
        want = model_of(NAME).generate(ids, attention_mask=torch.ones_like(ids), **settings)
        with batcher(NAME) as one:
            output, bare = one.generate([ROWS[0]] * 2, [settings, greedy(6)])
        for mine, theirs in ((output.scores, want.scores), (output.logits, want.logits)):
            torch.testing.assert_close(torch.stack(mine), torch.cat(theirs), rtol=1e-4, atol=1e-4)
        assert bare.scores is None and bare.logits is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 2}, "beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"use_cache": False}, "use_cache"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"token_healing": True}, "token_healing"),
        ({"cache_implementation": "static"}, "static"),
        ({"stop_strings": ["end"]}, "tokenizer"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_token": 3}, "max_new_token"),
    ],
)
def test_what_is_not_supported_is_named(settings, message):
    with batcher(NAME) as one:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            one.add_request(ROWS[0], generation_config=settings)
        assert one.step() == []


def test_a_config_is_not_changed():
    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5)
    before = config.to_dict()
    SamplingTemplate(model_of(NAME), config).for_prompt(ROWS[0], torch.device("cpu"))
    assert config.to_dict() == before


def test_equal_score_processors_share_a_call():
    template = SamplingTemplate(model_of(NAME), {"do_sample": True, "temperature": 0.5, "top_p": 0.9})
    keys = {template.for_prompt(row, torch.device("cpu")).batch_key for row in ROWS}
    assert len(keys) == 1 and None not in keys
    other = SamplingTemplate(model_of(NAME), {"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    assert other.for_prompt(ROWS[0], torch.device("cpu")).batch_key not in keys
    with_history = SamplingTemplate(model_of(NAME), {"repetition_penalty": 1.1})
    assert with_history.for_prompt(ROWS[0], torch.device("cpu")).batch_key is None
