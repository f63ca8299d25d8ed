"""The modes of generate on a real model: tokens in float32, logits in bfloat16 (CASES B37 in part)."""

import copy

import pytest
import torch
from test_modes import MODES, compare, run
from tiny_models import assert_same_text, prompts
from transformers import DynamicCache

import hf_paged

# The assistants are tiny models with another vocabulary; the real model assists itself below.
NAMES = [name for name in MODES if "assistant" not in MODES[name]]
ROWS = prompts()[::2]  # 5 and 33 tokens: the most padding, and half the work of all four


@pytest.fixture(scope="module")
def model(demo_model):
    model = copy.deepcopy(demo_model[0])
    model.generation_config.max_length = None
    return model


@pytest.mark.demo_model
@pytest.mark.parametrize("mode", NAMES)
def test_mode_equals_plain_generate(model, mode):
    settings = {"max_new_tokens": 6, **MODES[mode]}
    with torch.no_grad():
        want, got = (run(model, settings, paged, ROWS) for paged in (False, True))
    compare(got[0], want[0])
    assert got[1] == want[1] and torch.equal(got[2], want[2])


@pytest.mark.demo_model
def test_assisted_by_itself(model):
    ids = torch.arange(40, 60)[None]
    settings = {"max_new_tokens": 10, "do_sample": False}
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, assistant_model=model, cache_implementation="paged", **settings), want)


@pytest.mark.demo_model
def test_texts_of_chats_of_unequal_length(demo_model):
    model, tokenizer = demo_model
    chats = [
        [{"role": "user", "content": text}]
        for text in ("Hi", "Write a haiku about rivers.", "List the planets of the solar system, " * 6)
    ]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    batch = tokenizer.apply_chat_template(chats, padding=True, **options)
    settings = {"max_new_tokens": 24, "do_sample": False}
    out = model.generate(**batch, **settings, cache_implementation="paged")
    for row, chat in zip(out[:, batch["input_ids"].shape[1] :].tolist(), chats, strict=True):
        alone = tokenizer.apply_chat_template([chat], **options)
        want = model.generate(**alone, **settings)[0, alone["input_ids"].shape[1] :].tolist()
        assert_same_text(model, alone["input_ids"][0].tolist(), row[: len(want)], want)
        assert set(row[len(want) :]) <= {model.generation_config.pad_token_id}


@pytest.mark.demo_model
def test_bfloat16_logits_stay_as_near_to_plain_as_eager_and_sdpa_are(demo_model):
    _, tokenizer = demo_model
    text = "The river rises in the hills, runs past the old mill and the two bridges, and meets the sea. " * 6
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    logits = {}
    for name in ("sdpa", "eager", "hf_paged"):
        model = copy.deepcopy(demo_model[0]).to(torch.bfloat16)
        model.set_attn_implementation(name)
        kind = hf_paged.PagedCache if name == "hf_paged" else DynamicCache
        cache = kind(config=model.config)
        parts = [ids[:, :64], *ids[:, 64:].split(1, dim=1)][:33]
        with torch.no_grad():
            logits[name] = torch.cat([model(part, past_key_values=cache).logits.float() for part in parts], dim=1)
    between = (logits["eager"] - logits["sdpa"]).abs()
    ours = (logits["hf_paged"] - logits["sdpa"]).abs()
    assert between.max() > 0
    assert ours.mean() <= 2 * between.mean() and ours.max() <= 2 * between.max()
