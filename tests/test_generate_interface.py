"""The ways into a paged generate, what it returns, and what it refuses (CASES B22, B23, B40)."""

import pickle

import pytest
import torch
from tiny_models import assert_rows_equal_prompts_alone, build, oracle, oracles, padded, prompts, shared
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration, pipeline

import hf_paged

NEW = 12
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
PAGED = {"cache_implementation": "paged"}


@pytest.fixture
def batch():
    return padded(prompts())


def check(out):
    want = [text[:NEW] for text in oracles("llama_gqa")]
    assert_rows_equal_prompts_alone("llama_gqa", out, want=want)


def test_keyword(batch):
    check(shared("llama_gqa").generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED))


def test_inputs_as_keyword_or_as_input_ids(batch):
    model = shared("llama_gqa")
    check(model.generate(inputs=batch[0], attention_mask=batch[1], **GREEDY, **PAGED))
    check(model.generate(input_ids=batch[0], attention_mask=batch[1], **GREEDY, **PAGED))


@pytest.mark.parametrize("cache_config", [{"block_size": 4}, hf_paged.PagedCacheConfig(block_size=4), None])
def test_cache_config_as_dict_or_dataclass(batch, cache_config):
    out = shared("llama_gqa").generate(
        batch[0],
        attention_mask=batch[1],
        cache_config=cache_config,
        return_dict_in_generate=True,
        **GREEDY,
        **PAGED,
    )
    check(out.sequences)
    size = 4 if cache_config else 16
    assert out.past_key_values.cache_config.block_size == size


def test_generation_config_is_used_and_not_changed(batch):
    config = GenerationConfig(**GREEDY, **PAGED, cache_config={"block_size": 4}, return_dict_in_generate=True)
    before = config.to_dict()
    for _ in range(2):
        out = shared("llama_gqa").generate(batch[0], attention_mask=batch[1], generation_config=config)
        check(out.sequences)
        assert isinstance(out.past_key_values, hf_paged.PagedCache)
        assert config.to_dict() == before
    out = shared("llama_gqa").generate(batch[0], config, attention_mask=batch[1])  # by position
    check(out.sequences)


def test_models_own_generation_config(batch):
    model = build("llama_gqa")
    model.generation_config.cache_implementation = "paged"
    model.generation_config.cache_config = hf_paged.PagedCacheConfig(block_size=4)
    out = model.generate(batch[0], attention_mask=batch[1], **GREEDY, return_dict_in_generate=True)
    check(out.sequences)
    assert isinstance(out.past_key_values, hf_paged.PagedCache)
    assert out.past_key_values.cache_config.block_size == 4
    plain = model.generate(
        batch[0], attention_mask=batch[1], **GREEDY, cache_implementation=None, return_dict_in_generate=True
    )
    assert not isinstance(plain.past_key_values, hf_paged.PagedCache)


def test_pipeline(demo_model):
    model, tokenizer = demo_model
    texts = ["The capital of France is", "One, two, three, four, five, six, seven,"]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    want = [write(text, **settings)[0]["generated_text"] for text in texts]
    assert [write(text, **settings, **PAGED)[0]["generated_text"] for text in texts] == want


def test_user_made_cache(batch):
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    check(model.generate(batch[0], attention_mask=batch[1], past_key_values=cache, **GREEDY))
    cache.check_integrity()


def test_rows_that_end_at_different_steps():
    model = build("llama_gqa")
    ids, mask = padded(prompts())
    third = oracles("llama_gqa")[0][3]
    other = oracles("llama_gqa")[1][6]
    for eos, pad in ((third, 0), ([third, other], 0), (torch.tensor([third, other]), 0), (third, third), (None, 0)):
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
        want = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
        got = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings, **PAGED)
        assert torch.equal(got.sequences, want.sequences)
        assert type(got) is type(want) and list(got.keys()) == list(want.keys())
    model.generation_config.pad_token_id = None  # then the end token pads
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": third}
    want = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings, **PAGED), want)


def test_first_token_ends_the_text_and_neighbours_go_on():
    model = build("llama_gqa")
    ids, mask = padded(prompts())
    eos = oracles("llama_gqa")[1][0]
    out = model.generate(ids, attention_mask=mask, eos_token_id=eos, **GREEDY, **PAGED)
    assert out[1, ids.shape[1] :].tolist() == [eos] + [0] * (NEW - 1)
    for row in (0, 2, 3):
        assert out[row, ids.shape[1] :].tolist() == oracle(model, prompts()[row], NEW, eos_token_id=eos)
    alone = model.generate(ids[1:2], attention_mask=mask[1:2], eos_token_id=eos, **GREEDY, **PAGED)
    assert alone[0, ids.shape[1] :].tolist() == [eos]


def test_dict_output_with_scores_and_logits(batch):
    model = shared("llama_gqa")
    settings = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want = model.generate(batch[0], attention_mask=batch[1], **settings)
    got = model.generate(batch[0], attention_mask=batch[1], **settings, **PAGED)
    assert list(got.keys()) == list(want.keys())
    for mine, right in zip(got.logits + got.scores, want.logits + want.scores, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [1, 3])
def test_sampling_draws_what_plain_generate_draws(batch, samples):
    model = shared("llama_gqa")
    settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": samples, "top_k": 20}
    results = []
    for extra in ({}, PAGED):
        torch.manual_seed(3)
        results.append(model.generate(batch[0], attention_mask=batch[1], **settings, **extra))
        results.append(torch.get_rng_state())
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_greedy_leaves_the_random_generator_alone(batch):
    before = torch.get_rng_state()
    shared("llama_gqa").generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_samples_of_one_prompt_follow_the_models_distribution():
    model = shared("llama_gqa")
    ids = torch.tensor([prompts()[1]])
    with torch.no_grad():
        expected = torch.softmax(model(ids).logits[0, -1], dim=-1) * 800
    counts = torch.zeros_like(expected)
    for seed in range(200):
        torch.manual_seed(seed)
        out = model.generate(ids, max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=4, **PAGED)
        assert out.shape == (4, 18)
        counts.index_add_(0, out[:, -1], torch.ones(4))
    likely = expected >= 5
    cells = (
        torch.cat([counts[likely], counts[~likely].sum()[None]]),
        torch.cat([expected[likely], expected[~likely].sum()[None]]),
    )
    chi2 = float(((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum())
    degrees = len(cells[0]) - 1
    # Wilson-Hilferty: chi-square to a normal deviate; 3.09 is p = 0.001.
    deviate = ((chi2 / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert deviate < 3.09
    greedy = model.generate(ids, do_sample=False, max_new_tokens=NEW, num_beams=1, **PAGED)
    assert torch.equal(greedy, model.generate(ids, do_sample=False, max_new_tokens=NEW))


def test_one_new_token(batch):
    out = shared("llama_gqa").generate(batch[0], attention_mask=batch[1], max_new_tokens=1, do_sample=False, **PAGED)
    assert out[:, -1].tolist() == [text[0] for text in oracles("llama_gqa")]


def test_inputs_embeds_with_any_padding():
    model = shared("llama_gqa")
    want = [text[:NEW] for text in oracles("llama_gqa")]
    for side in ("left", "right"):
        ids, mask = padded(prompts(), side)
        embeds = model.get_input_embeddings()(ids).detach()
        out = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY, **PAGED)
        assert out.tolist() == want


def test_streamer_sees_the_callers_prompt():
    class Recorder:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.append(value)

        def end(self):
            self.ended = True

    row = prompts()[0]
    ids, mask = padded([row], "right", width=9)
    recorder = Recorder()
    out = shared("llama_gqa").generate(ids, attention_mask=mask, streamer=recorder, **GREEDY, **PAGED)
    assert torch.equal(recorder.seen[0], ids) and recorder.ended
    assert [int(token) for token in recorder.seen[1:]] == out[0, 9:].tolist() == oracles("llama_gqa")[0][:NEW]


REFUSED = [
    ({"use_cache": False}, ValueError, "use_cache=False"),
    ({"cache_config": {"block_sizes": 4}}, ValueError, "block_sizes"),
    ({"cache_config": {"block_size": 0}}, ValueError, "block_size must be an integer >= 1, got 0"),
    ({"cache_config": 16}, ValueError, "cache_config"),
    ({"cache_config": {"kv_cache_dtype": "fp8"}}, ValueError, "'fp8' is not one of 'auto', 'fp8_e4m3'"),
]


@pytest.mark.parametrize("extra, error, text", REFUSED)
def test_refusals_name_what_they_refuse(batch, extra, error, text):
    model = shared("llama_gqa")
    with pytest.raises(error, match=text):
        model.generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED, **extra)
    check(model.generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED))


def test_two_caches_are_refused(batch):
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config)
    with pytest.raises(ValueError, match="only one of the two"):
        model.generate(batch[0], attention_mask=batch[1], past_key_values=cache, **GREEDY, **PAGED)


def test_empty_prompts_are_refused(batch):
    model = shared("llama_gqa")
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), **GREEDY, **PAGED)
    mask = batch[1].clone()
    mask[2] = 0
    with pytest.raises(ValueError, match="row 2 of attention_mask has no real token"):
        model.generate(batch[0], attention_mask=mask, **GREEDY, **PAGED)
    check(model.generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED))


def test_exhaustion_names_the_counts_and_leaves_the_model_usable(batch, through_loop):
    model = shared("llama_gqa")
    with pytest.raises(RuntimeError, match=r"needs \d+ blocks?, \d+ available of 4 .*num_blocks"):
        model.generate(batch[0], attention_mask=batch[1], cache_config={"num_blocks": 4}, **GREEDY, **PAGED)
    assert model.config._attn_implementation == "eager"
    # 5 + 17 + 33 + 12 tokens and 11 cached new ones each: 1 + 2 + 3 + 2 blocks.
    check(model.generate(batch[0], attention_mask=batch[1], cache_config={"num_blocks": 8}, **GREEDY, **PAGED))


def test_encoder_decoder_keeps_its_self_attention_in_blocks():
    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = config.pad_token_id = 0
    model = T5ForConditionalGeneration(config).eval()
    ids, mask = padded([[4, 5, 6, 7, 8, 9, 3], [9, 8, 7]], side="right")
    settings = {"attention_mask": mask, "return_dict_in_generate": True, **GREEDY}
    want, got = model.generate(ids, **settings), model.generate(ids, **settings, **PAGED)
    assert torch.equal(got.sequences, want.sequences)
    assert isinstance(got.past_key_values.self_attention_cache, hf_paged.PagedCache)


def test_a_forward_that_exhausts_a_pool_changes_nothing():
    # gemma3 has a pool of windows and one of full attention; the second runs out in the third layer.
    model = build("gemma3", attn="hf_paged")
    cache = hf_paged.PagedCache(model.config, {"num_blocks": 6, "block_size": 4})
    ids = torch.tensor([prompts()[1] + prompts()[3]])
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        held = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(RuntimeError, match="needs 2 blocks, 1 available of 6"):
            model(ids[:, 20:28], past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 20]
        assert all(torch.equal(layer.keys, kept) for layer, kept in zip(cache.layers, held, strict=True))
        cache.check_integrity()
        got = model(ids[:, 20:23], past_key_values=cache).logits
        want = shared("gemma3")(ids[:, :23], use_cache=False).logits[:, 20:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def test_a_models_default_gives_way_to_the_cache_of_the_call():
    model = build("llama_gqa")
    model.generation_config.cache_implementation = "paged"
    ids = torch.tensor([prompts()[1]])
    out = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    longer = torch.cat([out.sequences, ids[:, :3]], dim=1)
    got = model.generate(longer, past_key_values=out.past_key_values, **GREEDY)
    model.generation_config.cache_implementation = None
    assert torch.equal(got, model.generate(longer, **GREEDY))


def test_an_assistant_whose_default_is_paged():
    model, assistant = build("llama_gqa"), build("llama_mqa")
    assistant.generation_config.cache_implementation = "paged"
    ids = torch.tensor([prompts()[2]])
    for extra in ({}, PAGED):
        out = model.generate(ids, assistant_model=assistant, **GREEDY, **extra)
        assert out[0, 33:].tolist() == oracles("llama_gqa")[2][:NEW]


def test_a_saved_generation_config_keeps_its_cache_settings(tmp_path):
    config = GenerationConfig(**PAGED, cache_config=hf_paged.PagedCacheConfig(block_size=4, num_blocks=7))
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.cache_implementation == "paged"
    assert hf_paged.PagedCacheConfig.from_any(loaded.cache_config) == config.cache_config


def test_columns_that_a_model_puts_before_the_prompt(batch):
    # As prompt tuning does: embeddings of its own before the padded prompt, all of them real.
    model = build("llama_gqa")
    virtual = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3))
    prepare = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        mask = inputs["attention_mask"]
        inputs["attention_mask"] = torch.cat([torch.ones(len(mask), 6, dtype=mask.dtype), mask], dim=1)
        inputs["position_ids"] = None
        if inputs["past_key_values"].get_seq_length() == 0:
            embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([virtual.expand(len(embeds), -1, -1), embeds], dim=1)
        return inputs

    model.prepare_inputs_for_generation = prepare_inputs_for_generation
    want = model.generate(batch[0], attention_mask=batch[1], **GREEDY)
    assert torch.equal(model.generate(batch[0], attention_mask=batch[1], **GREEDY, **PAGED), want)


def test_negative_prompts_are_not_moved_with_the_prompt():
    model = shared("llama_gqa")
    negative, negative_mask = padded(prompts((4, 7, 9, 33)))
    settings = {"guidance_scale": 1.7, "negative_prompt_ids": negative, "negative_prompt_attention_mask": negative_mask}
    texts = []
    for side, extra in (("left", {}), ("left", PAGED), ("right", PAGED)):
        ids, mask = padded(prompts(), side)
        texts.append(model.generate(ids, attention_mask=mask, **settings, **GREEDY, **extra)[:, 33:].tolist())
    assert texts[1] == texts[0] and texts[2] == texts[0]


def test_settings_for_a_cache_that_is_passed_are_refused(batch):
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config)
    with pytest.raises(ValueError, match="cache_config configures a new cache"):
        model.generate(batch[0], past_key_values=cache, cache_config={"block_size": 4}, **GREEDY)
    with pytest.raises(ValueError, match="cache_implementation is not 'paged'"):
        model.generate(batch[0], cache_config=hf_paged.PagedCacheConfig(), **GREEDY)


def test_another_batch_needs_another_cache(batch):
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config)
    model.generate(batch[0][:1], attention_mask=batch[1][:1], past_key_values=cache, **GREEDY)
    longer = torch.nn.functional.pad(batch[0], (0, NEW), value=9)
    with pytest.raises(ValueError, match="batch=1.*make a new PagedCache"):
        model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, **GREEDY)


def test_a_mask_of_other_rows_is_refused(batch):
    with pytest.raises(ValueError, match="attention_mask has 1 rows and input_ids 4"):
        shared("llama_gqa").generate(batch[0], attention_mask=batch[1][2:3], **GREEDY, **PAGED)


def test_what_a_cache_cannot_do_is_refused_by_name():
    cache = hf_paged.PagedCache(shared("llama_gqa").config)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)
    for name in ("offload", "prefetch"):
        with pytest.raises(NotImplementedError, match="offloading"):
            getattr(cache, name)(0)


@pytest.mark.parametrize("name", ["bloom", "llama_gqa"])
def test_padding_is_left_out_only_where_the_interface_masks_it(batch, name):
    settings = {**GREEDY, **PAGED, "cache_config": {"block_size": 4}, "return_dict_in_generate": True}
    out = shared(name).generate(batch[0], attention_mask=batch[1], **settings)
    columns = [33] * 4 if name == "bloom" else [len(row) for row in prompts()]
    assert out.past_key_values.stats().blocks_held == sum(-(-(count + NEW - 1) // 4) for count in columns)
