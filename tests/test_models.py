"""Every kind of model gives plain generate's text over pages, or a refusal that says why (docs/models.md).

Each family generates 24 tokens for four left-padded prompts of unequal length, far past any window, in float32; every
row must be its prompt's text alone. Encoder-decoder and vision-language models are compared with plain generate of the
same batch.
"""

import pytest
import torch
from batcher_helpers import expected
from more_models import MORE, VISION, build_more, build_vision, is_encoder_decoder
from tables import Table
from tiny_models import FAMILIES, assert_same_text, build, padded, prompts

import hf_paged
from hf_paged import attention, layer

NEW = 24
REFUSED = {
    "mamba": "no layer that keeps plain keys and values",
    "minimax": "brings its own kind of cache",
}
TABLE = Table("models.md", ["model", "special", "result", "path"], [*FAMILIES, *MORE, *VISION])
SPECIAL = {
    "llama_gqa": "grouped-query attention",
    "llama_mqa": "multi-query attention",
    "llama_hd80": "head_dim 80",
    "llama_hd96": "head_dim 96",
    "llama_hd24": "head_dim 24, not hidden / heads",
    "qwen2": "biases on Q, K, V",
    "qwen3": "norms on Q and K",
    "mistral_swa": "sliding window",
    "gemma2": "softcap, own scale, hybrid windows",
    "gemma3": "hybrid windows",
    "gpt_oss": "attention sinks, hybrid windows",
    "granite": "own scale",
    "deepseek_v3": "MLA: latents in the cache",
    "gpt2": "learned positions",
    "bloom": "ALiBi, own attention",
    "gemma3n": "layers that share K and V",
    "qwen3_next": "linear attention between attention layers",
} | {name: special for name, (_, _, special) in {**MORE, **VISION}.items()}


class Path:
    """Which way the attention of one call went."""

    def __init__(self, monkeypatch):
        self.gathered = 0
        gather = layer.PagedLayer.gather

        def counted(*args):
            self.gathered += 1
            return gather(*args)

        monkeypatch.setattr(layer.PagedLayer, "gather", counted)
        attention.calls.clear()

    def name(self, cache) -> str:
        paged, gathered = attention.calls["paged"] > 0, self.gathered > 0
        path = {(True, False): "paged operators", (False, True): "dense gather", (True, True): "both"}[paged, gathered]
        cache = getattr(cache, "self_attention_cache", cache)
        own = {type(one).__name__ for one in cache.layers if not isinstance(one, hf_paged.PagedLayer)} - {"DummyLayer"}
        return path + (", other layers keep transformers' cache" if own else "")


def paged(model, ids, mask, **settings):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="paged",
        cache_config={"block_size": 4},
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize("name", [*FAMILIES, *[one for one in MORE if not is_encoder_decoder(one)]])
def test_decoder_only(name, monkeypatch):
    model = build(name) if name in FAMILIES else build_more(name)
    ids, mask = padded(prompts())
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[name]):
            paged(model, ids, mask)
        TABLE.record(name, SPECIAL[name], "`NotImplementedError`: " + REFUSED[name], "none")
        return
    path = Path(monkeypatch)
    out = paged(model, ids, mask)
    route = path.name(out.past_key_values)
    for row, prompt in zip(out.sequences[:, ids.shape[1] :].tolist(), prompts(), strict=True):
        assert_same_text(model, prompt, row, expected(name, prompt, NEW))
    out.past_key_values.check_integrity()
    TABLE.record(name, SPECIAL[name], "equal", route)


@pytest.mark.parametrize("name", [one for one in MORE if is_encoder_decoder(one)])
def test_encoder_decoder(name, monkeypatch):
    model = build_more(name)
    ids, mask = padded(prompts(), "right")
    path = Path(monkeypatch)
    out = paged(model, ids, mask)
    route = path.name(out.past_key_values)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out.sequences, want)
    beams = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, cache_implementation="paged", **beams), model.generate(ids, **beams))
    TABLE.record(name, SPECIAL[name], "equal", route)


@pytest.mark.parametrize("name", VISION)
def test_vision_language(name, monkeypatch):
    model, inputs = build_vision(name)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    path = Path(monkeypatch)
    out = paged(model, ids, mask, **inputs)
    route = path.name(out.past_key_values)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **inputs)
    assert torch.equal(out.sequences, want)
    TABLE.record(name, SPECIAL[name], "equal", route)


@pytest.mark.parametrize("name", ["bamba", "lfm2", "gpt_neo", "falcon", "diffllama", "jetmoe", "llama4", "cohere2"])
def test_beams_and_padding_on_the_right(name):
    model = build_more(name)
    ids, mask = padded(prompts())
    beams = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, attention_mask=mask, **beams)
    assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation="paged", **beams), want)
    right, right_mask = padded(prompts(), "right")
    out = paged(model, right, right_mask).sequences
    assert torch.equal(out[:, 33:], paged(model, ids, mask).sequences[:, 33:])


def test_table_is_current(request):
    TABLE.check(request.config.getoption("--update-tables"))
