"""Every mode of generate over pages equals plain generate, or is refused by name (docs/modes.md; CASES B21, B22, B25).

Each mode runs on a full-attention and a sliding-window model, for left-padded prompts of unequal length where
transformers takes a batch.
"""

import copy
import functools

import pytest
import torch
from tables import Table
from tiny_models import build, padded, prompts, shared
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import attention, generate

NEW = 16
MODELS = ["llama_gqa", "mistral_swa"]


class Even(LogitsProcessor):
    """A user's processor that reads the history: the next token is even where the last one was odd."""

    def __call__(self, input_ids, scores):
        wrong = (torch.arange(scores.shape[1])[None] % 2) != 1 - input_ids[:, -1:] % 2
        return scores.masked_fill(wrong, float("-inf"))


class Seen(StoppingCriteria):
    """Stops a row once it has produced a token divisible by 7."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


class Recorder(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A callable custom_generate: greedy, two tokens."""
    for first in (True, False):
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=None if first else 1, is_first_iteration=first, **model_kwargs
        )
        outputs = model(**inputs, return_dict=True)
        input_ids = torch.cat([input_ids, outputs.logits[:, -1:].argmax(-1)], dim=1)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    return input_ids


SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
BEAMS = {"num_beams": 4, **SCORES}
SAMPLE = {"do_sample": True, "seed": 5}

# name -> settings. "alone" marks modes that transformers allows for one prompt only.
MODES = {
    "greedy, tokens alone": {},
    "sampling, tokens alone": SAMPLE,
    "greedy": SCORES,
    "sampling": {**SAMPLE, **SCORES},
    "temperature, top_k, top_p": {**SAMPLE, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "typical_p": {**SAMPLE, "typical_p": 0.5},
    "epsilon_cutoff, eta_cutoff": {**SAMPLE, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "num_return_sequences": {**SAMPLE, "num_return_sequences": 3},
    "beam search": BEAMS,
    "beam search, all beams returned": {**BEAMS, "num_return_sequences": 4, "early_stopping": True},
    "beam search, length_penalty": {**BEAMS, "length_penalty": -1.0, "eos_token_id": 17},
    "beam sampling": {**SAMPLE, **BEAMS},
    "assisted decoding": {"assistant": "llama_mqa", "alone": True},
    "assisted decoding, sampled": {**SAMPLE, "assistant": "llama_mqa", "alone": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "alone": True},
    "inputs_embeds": {"embeds": True},
    "prefill_chunk_size": {"prefill_chunk_size": 5},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[9], [11, 12], [100]]},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[11, 12], -4.0]]},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": 17},
    "min_length": {"min_length": 40, "oracle": "alone", "eos_token_id": list(range(3, 60))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 17},
    "suppress_tokens, begin_suppress_tokens": {"suppress_tokens": [9, 10], "begin_suppress_tokens": [11]},
    "forced_eos_token_id": {"forced_eos_token_id": 17, "eos_token_id": 17},
    "renormalize_logits, remove_invalid_values": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermarking_config": {**SAMPLE, "watermarking_config": WatermarkingConfig(bias=2.5)},
    "guidance_scale, negative_prompt_ids": {"guidance_scale": 1.5, "negative": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [row + 3, row + 4, 100]},
    "logits_processor of the user's": {"logits_processor": [Even()]},
    "stopping_criteria of the user's": {"stopping_criteria": [Seen()], "eos_token_id": 17},
    "max_length": {"max_length": 45, "max_new_tokens": None},
    "max_time": {"max_time": 1000.0},
    "eos_token_id as a list": {"eos_token_id": [17, 18, 19, 20, 21]},
    "pad_token_id absent": {"pad_token_id": None, "eos_token_id": [17, 18, 19, 20, 21]},
    "output_attentions, output_hidden_states": {**SCORES, "output_attentions": True, "output_hidden_states": True},
    "streamer": {"streamed": True, "alone": True},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "callable custom_generate": {"custom_generate": own_loop},
}
REFUSED = {
    "use_cache=False": ({"use_cache": False}, ValueError, "use_cache=False"),
    "past_key_values beside it": ({"cache": True}, ValueError, "only one of the two"),
    "contrastive search (needs code from the Hub)": ({"penalty_alpha": 0.6, "top_k": 4}, None, None),
    "group beam search (needs code from the Hub)": ({"num_beams": 4, "num_beam_groups": 2}, None, None),
}
TABLE = Table("modes.md", ["mode", "result", "path"], [*MODES, *REFUSED])


def run(model, settings: dict, paged: bool, rows: list | None = None):
    """Output of one call, what its streamer saw, and where the random generator ends."""
    settings, rows = copy.copy(settings), prompts() if rows is None else rows
    if settings.pop("oracle", None) and not paged:  # lengths count padding in plain generate's batch
        texts = [run_rows(model, settings, [row], paged)[0][0, len(row) :].tolist() for row in rows]
        new = max(map(len, texts))
        ids, _ = padded(rows)
        texts = torch.tensor([text + [0] * (new - len(text)) for text in texts])
        return torch.cat([ids, texts], dim=1), None, torch.get_rng_state()
    rows = [max(rows, key=len)] if settings.pop("alone", False) else rows
    return run_rows(model, settings, rows, paged)


def run_rows(model, settings: dict, rows: list, paged: bool):
    settings = copy.copy(settings)
    ids, mask = padded(rows)
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    if settings.pop("embeds", False):
        arguments["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    else:
        arguments["input_ids"] = ids
    if settings.pop("negative", False):
        arguments["negative_prompt_ids"] = ids.flip(1)
        arguments["negative_prompt_attention_mask"] = mask.flip(1)
    if (assistant := settings.pop("assistant", None)) is not None:
        arguments["assistant_model"] = shared(assistant)
    if settings.pop("cache", False):
        arguments["past_key_values"] = hf_paged.PagedCache(model.config)
    streamer = arguments["streamer"] = Recorder() if settings.pop("streamed", False) else None
    torch.manual_seed(settings.pop("seed", 0))
    arguments |= settings
    if paged:
        arguments |= {"cache_implementation": "paged", "cache_config": {"block_size": 4}}
    output = model.generate(**arguments)
    return output, streamer and streamer.values, torch.get_rng_state()


def compare(mine, right) -> None:
    """Same type, same fields, same tokens, numbers equal up to rounding."""
    if isinstance(right, torch.Tensor):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        if right.is_floating_point():
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=2e-4)
        else:
            assert torch.equal(mine, right)
    elif isinstance(right, tuple | list):
        assert len(mine) == len(right)
        for a, b in zip(mine, right, strict=True):
            compare(a, b)
    elif hasattr(right, "sequences"):
        assert type(mine) is type(right) and list(mine.keys()) == list(right.keys())
        for name in right:
            if name != "past_key_values":
                compare(*(strip_padding(name, one) for one in (mine, right)))
    else:
        assert mine == right or (mine is None) == (right is None)


def strip_padding(name: str, output):
    """Hidden states and attentions of padding are nobody's; keep the last column, which is always a token's."""
    values = output[name]
    if name in ("attentions", "hidden_states"):
        values = tuple(tuple(layer[..., -1:, :] for layer in step) for step in values)
    return values


@functools.cache
def model_of(name: str):
    return build(name)


@pytest.mark.parametrize("mode", MODES)
def test_mode_equals_plain_generate(mode, monkeypatch):
    paths, batched = set(), []
    hand_over = generate.sample_batched
    monkeypatch.setattr(generate, "sample_batched", lambda *args: batched.append(hand_over(*args)) or batched[-1])
    for name in MODELS:
        model = model_of(name)
        want = run(model, MODES[mode], paged=False)
        attention.calls.clear()
        got = run(model, MODES[mode], paged=True)
        paths |= {path for path in ("paged", "dense") if attention.calls[path]}
        paths |= {"batched" for result in batched if result is not None}
        compare(got[0], want[0])
        assert got[1] == want[1]
        assert torch.equal(got[2], want[2]), "the random generator ends elsewhere"
        if hasattr(got[0], "past_key_values"):
            got[0].past_key_values.check_integrity()
    way = "batcher" if "batched" in paths else "loop" if "dense" not in paths else "loop, gathered"
    TABLE.record(mode, "equal", way)


@pytest.mark.parametrize("mode", REFUSED)
def test_mode_is_refused_by_name(mode):
    settings, error, text = REFUSED[mode]
    model = model_of("llama_gqa")
    if error is None:  # plain generate refuses it, too, without the Hub
        with pytest.raises(Exception) as plain:
            run(model, settings, paged=False)
        error, text = type(plain.value), None
    with pytest.raises(error, match=text):
        run(model, settings, paged=True)
    TABLE.record(mode, f"`{error.__name__}`", "none")


@pytest.mark.parametrize("name", MODELS)
def test_beams_past_the_window_with_forks(name):
    model = model_of(name)
    for length in (15, 16, 17, 33):
        ids = torch.tensor(prompts((length,), seed=length))
        settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 40}
        want = model.generate(ids, **settings)
        got = model.generate(ids, cache_implementation="paged", return_dict_in_generate=True, **settings)
        assert torch.equal(got.sequences, want)
        stats = got.past_key_values.stats()
        assert stats.blocks_used == stats.blocks_held


OWN = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 90))},
    "min_length": {"min_length": 30, "eos_token_id": list(range(3, 90))},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 150))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 17},
    "the user's": {"logits_processor": [Even()]},
}


@functools.cache
def texts_alone(name, beams):
    """What plain generate makes of each prompt alone, whatever side a batch would pad."""
    settings = own_settings(name, beams)
    rows = [(torch.tensor([prompt]), len(prompt)) for prompt in prompts()]
    return [model_of("llama_gqa").generate(ids, **settings)[0, length:].tolist() for ids, length in rows]


def own_settings(name, beams):
    # The padding token is a likely one, so that counting it would show.
    return {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "pad_token_id": 9, **OWN[name]}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", OWN)
def test_processors_see_a_rows_own_tokens_and_not_its_padding(name, side, beams):
    model, settings = model_of("llama_gqa"), own_settings(name, beams)
    ids, mask = padded(prompts(), side, pad=9)
    out = model.generate(ids, attention_mask=mask, cache_implementation="paged", **settings)
    for row, alone in zip(out[:, 33:].tolist(), texts_alone(name, beams), strict=True):
        assert row == alone + [9] * (len(row) - len(alone))


def test_a_users_processor_is_called_with_own_tokens_and_prefix_functions_know_their_row():
    seen, rows = [], set()

    def processor(input_ids, scores):
        seen.append(input_ids.tolist())
        return scores

    def allowed(row, tokens):
        rows.add((row, len(tokens)))
        return [row + 3]

    ids, mask = padded(prompts())
    settings = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "paged"}
    out = model_of("llama_gqa").generate(
        ids, attention_mask=mask, logits_processor=[processor], prefix_allowed_tokens_fn=allowed, **settings
    )
    assert seen[:4] == [[prompt] for prompt in prompts()]
    assert seen[4:] == [[prompt + [row + 3]] for row, prompt in enumerate(prompts())]
    assert rows == {(row, len(prompt) + step) for row, prompt in enumerate(prompts()) for step in (0, 1)}
    assert out[:, 33:].tolist() == [[row + 3] * 2 for row in range(4)]


def test_greedy_copies_of_one_prompt_are_equal_rows():
    model = model_of("llama_gqa")
    ids = torch.tensor([prompts()[1]])
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(ids, do_sample=False, num_return_sequences=4, max_new_tokens=4)
    out = model.generate(ids.repeat(4, 1), do_sample=False, max_new_tokens=12, cache_implementation="paged")
    assert all(torch.equal(out[0], row) for row in out)


def test_the_callers_temperature_counts_and_not_the_models():
    model = build("llama_gqa")
    model.generation_config.temperature, model.generation_config.do_sample = 0.01, True
    compare(*(run(model, {**SAMPLE, "temperature": 1.5}, paged)[0] for paged in (True, False)))


def test_custom_generate_that_is_loaded(tmp_path):
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    code = "def generate(model, **kwargs):\n    kwargs['max_new_tokens'] = 3\n    return model.generate(**kwargs)\n"
    (folder / "generate.py").write_text(code, encoding="utf-8")
    settings = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    want, got = (run(model_of("llama_gqa"), settings, paged)[0] for paged in (False, True))
    assert got.shape[1] == 36 and torch.equal(got, want)
    ids, mask = padded(prompts())
    call = {"attention_mask": mask, "cache_implementation": "paged", "return_dict_in_generate": True, **settings}
    assert isinstance(model_of("llama_gqa").generate(ids, **call).past_key_values, hf_paged.PagedCache)


def test_stop_strings(demo_model):
    model, tokenizer = demo_model
    texts = ["One, two, three, four,", "The days of the week are Monday, Tuesday,"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 12, "do_sample": False, "stop_strings": [" six", "day"], "tokenizer": tokenizer}
    want = model.generate(**batch, **settings)
    assert torch.equal(model.generate(**batch, cache_implementation="paged", **settings), want)


def test_returned_cache_continues_like_plain():
    model = model_of("mistral_swa")
    ids, mask = padded(prompts())
    outputs = []
    for extra in ({}, {"cache_implementation": "paged"}):
        settings = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
        out = model.generate(ids, attention_mask=mask, **settings, **extra)
        more = torch.cat([out.sequences, torch.full((4, 2), 9)], dim=1)
        longer = torch.cat([mask, torch.ones(4, 11, dtype=mask.dtype)], dim=1)
        outputs.append(model.generate(more, attention_mask=longer, past_key_values=out.past_key_values, **settings))
    assert torch.equal(outputs[1].sequences, outputs[0].sequences)


def test_table_is_current(request):
    TABLE.check(request.config.getoption("--update-tables"))
