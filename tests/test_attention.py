"""The hf_paged attention and mask functions: without a cache, over dense paths, with what they do not know."""

import pytest
import torch
from tiny_models import FAMILIES, build, padded, prompts, shared, widen
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sliding_window_causal_mask_function,
)

import hf_paged
from hf_paged import attention
from hf_paged.lazy import LazyKV, LazyMask, left_padding

# Families whose attention implementation can be chosen, and the one that sdpa serves.
CHOOSABLE = [name for name in FAMILIES if name != "bloom"]


@pytest.fixture
def count():
    attention.calls.clear()
    return attention.calls


@pytest.mark.parametrize("name", CHOOSABLE)
def test_without_a_cache_it_equals_the_models_own_attention(name, count):
    # sdpa, or eager where sdpa does not know the model's softcap or sinks.
    reference = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    models = [build(name, attn=attn).train() for attn in (reference, "hf_paged")]
    ids, mask = padded(prompts())
    results = []
    for model in models:
        torch.manual_seed(0)
        out = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        out.loss.backward()
        results.append((out.logits[mask.bool()], {n: p.grad for n, p in model.named_parameters()}))
    assert count["uncached"] > 0 and not count["paged"]
    assert torch.equal(results[0][0], results[1][0])
    for parameter, grad in results[0][1].items():
        if grad is not None:
            # Experts add their rows in an order that threads decide.
            torch.testing.assert_close(results[1][1][parameter], grad, rtol=1e-5, atol=1e-6, msg=parameter)


def test_packed_training_batches_keep_their_sequences_apart():
    models = [build("llama_gqa", attn=attn) for attn in ("sdpa", "hf_paged")]
    ids = torch.tensor([prompts()[0] + prompts()[3]])
    positions = torch.tensor([[*range(5), *range(12)]])
    with torch.no_grad():
        want, got = (model(ids, position_ids=positions, use_cache=False).logits for model in models)
        alone = models[0](ids[:, 5:], use_cache=False).logits
    assert torch.equal(got, want)
    torch.testing.assert_close(got[:, 5:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attn", ["eager", "sdpa", "hf_paged"])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "deepseek_v3", "gemma3n"])
def test_any_attention_implementation_over_a_paged_cache(name, attn):
    model = build(name, attn=attn)
    ids, mask = padded(prompts())
    want, got = DynamicCache(config=model.config), hf_paged.PagedCache(model.config, {"block_size": 4})
    with torch.no_grad():
        for first, last in ((0, 20), (20, 32), (32, 33)):
            part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last]}
            logits = [model(**part, past_key_values=cache).logits for cache in (want, got)]
            real = mask[:, first:last].bool()
            torch.testing.assert_close(logits[1][real], logits[0][real], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_masks_with_holes_take_the_dense_path_and_are_right(name, count):
    model = build(name, attn="hf_paged")
    ids, mask = padded(prompts())
    mask[2, 10:14] = 0
    mask[1, -3] = 0
    with torch.no_grad():
        want = shared(name)(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
        got = model(ids, attention_mask=mask, past_key_values=hf_paged.PagedCache(model.config)).logits
    assert count["dense"] == 3 and not count["paged"]
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["bool", "additive", "bidirectional"])
def test_custom_4d_masks(kind, count):
    model = build("llama_gqa", attn="hf_paged")
    ids = torch.tensor([prompts()[1]])
    allowed = torch.ones(1, 1, 17, 17).tril().bool()
    allowed[..., 9, 3] = False
    if kind == "bidirectional":
        allowed[..., 4:8, 4:8] = True
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = shared("llama_gqa")(ids, attention_mask=additive, use_cache=False).logits
        cache = hf_paged.PagedCache(model.config)
        got = model(ids, attention_mask=allowed if kind == "bool" else additive, past_key_values=cache).logits
    assert count["dense"] == 3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def paged_call(attn="hf_paged", **extra):
    """One attention call over a fresh cache of 5 tokens, and what went into it."""
    model = build("llama_gqa", attn=attn)
    module = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2, 2))
    cache = hf_paged.PagedCache(model.config)
    lazy = cache.update(key, value, 0)
    mask = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min).triu(1)
    settings = {"scaling": 0.25, **extra}
    out, _ = attention.hf_paged_attention(module, query, *lazy, None, **settings)
    return out, (module, query, key, value, mask)


def test_position_bias_goes_to_the_dense_path(count):
    bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    out, (module, query, key, value, mask) = paged_call(position_bias=bias)
    assert count["dense"] == 1
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.25 + bias + mask
    want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_arguments_without_effect_do_not_leave_the_pages(count):
    paged_call(position_ids=torch.arange(5)[None], output_attentions=False, something_absent=None)
    assert count["paged"] == 1


def test_unknown_arguments_raise_where_nothing_knows_them(monkeypatch):
    model = build("llama_gqa", attn="hf_paged")
    module = torch.nn.Module()  # lives in a file without eager attention
    module.config = model.config
    lazy = hf_paged.PagedCache(model.config).update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16), 0)
    with pytest.raises(ValueError, match="does not know 'head_gate'"):
        attention.hf_paged_attention(module, torch.zeros(1, 4, 5, 16), *lazy, None, scaling=0.25, head_gate=1.5)


def test_no_mask_means_what_it_means_to_the_models_own_attention(count):
    # sdpa reads None as causal, eager as everything.
    out, (_, query, key, value, mask) = paged_call()
    assert count["paged"] == 1
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.25
    everything, causal = ((scores + one).softmax(-1) @ value.repeat_interleave(2, 1) for one in (0, mask))
    torch.testing.assert_close(out, causal.transpose(1, 2), rtol=1e-4, atol=1e-5)
    out, _ = paged_call("eager")
    torch.testing.assert_close(out, everything.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_dropout_over_a_cache_is_applied(count):
    out, _ = paged_call(dropout=0.9)
    assert count["dense"] == 1
    without, _ = paged_call()
    assert not torch.allclose(out, without)


def test_pattern_is_recognised_by_the_function_alone():
    assert attention._pattern(causal_mask_function) == 0
    assert attention._pattern(sliding_window_causal_mask_function(5)) == 5
    assert attention._pattern(chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int))) is None
    assert attention._pattern(lambda batch, head, query, key: key <= query) is None


@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
def test_lazy_masks_become_what_eager_expects(create):
    config = build("mistral_swa", attn="hf_paged").config
    eager = build("mistral_swa").config
    _, mask = padded(prompts())
    embeds = torch.zeros(4, 33, 8)
    lazy, want = (create(one, embeds, mask, None) for one in (config, eager))
    assert isinstance(lazy, LazyMask) and lazy.pattern == (0 if create is create_causal_mask else 8)
    assert lazy.shape == want.shape and lazy.dtype == want.dtype
    assert torch.equal(lazy + 0, want)


def test_left_padding():
    rows = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert left_padding(rows, 4).tolist() == [2, 0, 4]
    assert left_padding(torch.tensor([[0, 1, 0, 1]]), 4) is False
    assert left_padding(torch.tensor([[1, 1, 0]]), 3) is False
    assert left_padding(torch.tensor([[1, 1]]), 3) is False  # missing columns count as masked
    assert left_padding(torch.tensor([[0, 1, 1, 0]]), 3).tolist() == [1]


def test_lazy_tensors_act_like_the_dense_ones():
    dense = torch.randn(1, 2, 3, 4)
    made = []

    def gather():
        made.append(1)
        return dense

    lazy = LazyKV(dense.shape, dense.dtype, dense.device, None, None, gather)
    assert (lazy.shape, lazy.dtype, lazy.device) == (dense.shape, dense.dtype, dense.device)
    assert "lazy" in repr(lazy) and not made
    assert torch.equal(lazy.transpose(1, 2).reshape(1, 3, 8), dense.transpose(1, 2).reshape(1, 3, 8))
    assert torch.equal(torch.cat([lazy, lazy], dim=2), torch.cat([dense, dense], dim=2))
    assert torch.equal(lazy[:, :, -1:], dense[:, :, -1:]) and torch.equal(lazy.to(torch.float64), dense.double())
    assert len(made) == 1 and "dense" in repr(lazy)


def test_compiled_model_without_a_cache():
    model = build("llama_gqa", attn="hf_paged")
    ids, mask = padded(prompts())
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


def test_sparse_attention_keeps_the_implementation_that_applies_it():
    # Models that choose keys by an index apply it only under the names that they know.
    changes = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    if "deepseek_v32" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no deepseek_v32")
    settings = {**changes, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 4}
    config = CONFIG_MAPPING["deepseek_v32"](
        vocab_size=199,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **settings,
    )
    torch.manual_seed(0)
    model = widen(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids, mask = padded(prompts())
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, **call)
    assert torch.equal(model.generate(ids, past_key_values=hf_paged.PagedCache(model.config), **call), want)
    with pytest.raises(NotImplementedError, match="no layer that keeps plain keys"):
        model.generate(ids, cache_implementation="paged", **call)
    model.set_attn_implementation("hf_paged")
    with pytest.raises(ValueError, match="does not know 'indices'"):
        model.generate(ids, **call)
