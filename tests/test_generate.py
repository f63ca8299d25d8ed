"""generate(cache_implementation="paged") gives the text of plain generate, row by row (CASES B13-B20, B34, B42)."""

import functools

import pytest
import torch
from tiny_models import (
    FAMILIES,
    PAGED_FAMILIES,
    assert_rows_equal_prompts_alone,
    build,
    oracle,
    padded,
    prompts,
    shared,
)
from transformers import DynamicCache

import hf_paged
import hf_paged_kernels as kernels
from hf_paged import attention, layer

NEW = 24


@functools.cache
def rows_and_texts(name, lengths, seed, new):
    """Prompts, and the oracle's text of each; the same for all sizes of blocks and chunks."""
    rows = prompts(lengths, seed=seed)
    return rows, [oracle(shared(name), row, new) for row in rows]


def paged(model, ids, mask=None, cache_config=None, **kwargs):
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, cache_implementation="paged", cache_config=cache_config, **kwargs)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_left_padded_rows_equal_their_prompts_alone(name, block_size, through_loop):
    ids, mask = padded(prompts())
    out = paged(shared(name), ids, mask, {"block_size": block_size})
    assert out.shape == (4, ids.shape[1] + NEW)
    assert torch.equal(out[:, : ids.shape[1]], ids)
    assert_rows_equal_prompts_alone(name, out)


@pytest.mark.parametrize("name", PAGED_FAMILIES)
def test_paged_operators_serve_without_any_dense_gather(name, monkeypatch, through_loop):
    def refuse(*args, **kwargs):
        raise AssertionError("a dense copy of the cache was made")

    monkeypatch.setattr(layer.PagedLayer, "gather", refuse)
    kernels.reset_op_calls()
    attention.calls.clear()
    ids, mask = padded(prompts())
    out = paged(shared(name), ids, mask)
    assert_rows_equal_prompts_alone(name, out)
    ran = kernels.op_calls()
    layers = sum(isinstance(one, hf_paged.PagedLayer) for one in hf_paged.PagedCache(shared(name).config).layers)
    reading = attention.calls["paged"] // NEW
    assert reading >= layers > 0
    assert ran["paged_prefill"] == reading and ran["paged_decode"] == reading * (NEW - 1)
    assert ran["reshape_and_cache"] == layers * NEW
    assert not attention.calls["dense"]


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3"])
def test_models_with_their_own_attention_gather_by_themselves(name):
    kernels.reset_op_calls()
    ids, mask = padded(prompts())
    paged(shared(name), ids, mask)
    ran = kernels.op_calls()
    assert ran["reshape_and_cache"] == 3 * NEW and not ran.get("paged_decode")


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "gpt2", "gemma3", "qwen3_next", "bloom"])
@pytest.mark.parametrize("layout", ["right", "holes", "both"])
def test_padding_anywhere(name, layout):
    rows = prompts()
    width = 40
    ids, mask = [], []
    for index, row in enumerate(rows):
        middle = len(row) // 2
        if layout == "right":
            cells = [(token, 1) for token in row] + [(0, 0)] * (width - len(row))
        elif layout == "holes":
            cells = [(t, 1) for t in row[:middle]] + [(7, 0)] * (index + 1) + [(t, 1) for t in row[middle:]]
            cells = [(0, 0)] * (width - len(cells)) + cells
        else:
            cells = [(0, 0)] * 2 + [(token, 1) for token in row] + [(9, 0)] * (width - 2 - len(row))
        ids.append([token for token, _ in cells])
        mask.append([real for _, real in cells])
    ids, mask = torch.tensor(ids), torch.tensor(mask)
    out = paged(shared(name), ids, mask)
    assert out.shape == (4, width + NEW)
    assert torch.equal(out[:, :width], ids)
    assert_rows_equal_prompts_alone(name, out)


def test_pad_token_that_is_a_real_token_or_the_end_token():
    model = build("llama_gqa")
    rows = prompts()
    pad = rows[0][2]  # occurs as a real token
    model.generation_config.pad_token_id = pad
    ids, mask = padded(rows, pad=pad)
    assert_rows_equal_prompts_alone("llama_gqa", paged(model, ids, mask))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    ids, mask = padded(rows, pad=2)
    got, want = paged(model, ids, mask), model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, want)


def test_without_a_mask_it_is_plain_generate_without_a_mask():
    ids, _ = padded(prompts())
    want = shared("llama_gqa").generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(paged(shared("llama_gqa"), ids), want)


@pytest.mark.parametrize("name", ["mistral_swa", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_prompts_around_the_window(name, block_size):
    rows, want = rows_and_texts(name, (1, 7, 8, 9, 17, 33), 11, NEW)
    ids, mask = padded(rows)
    for extra in ({}, {"prefill_chunk_size": 3}):
        out = paged(shared(name), ids, mask, {"block_size": block_size}, **extra)
        assert_rows_equal_prompts_alone(name, out, rows, want)


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 32, 64])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gemma3n"])
def test_chunked_prefill_changes_nothing(name, chunk):
    rows, want = rows_and_texts(name, (33, 48), 5, 8)
    ids, mask = padded(rows)
    out = paged(shared(name), ids, mask, max_new_tokens=8, prefill_chunk_size=chunk)
    assert_rows_equal_prompts_alone(name, out, rows, want)


@pytest.mark.parametrize("head_dim", [8, 24, 80, 96, 120, 256])
@pytest.mark.parametrize("kv_heads, block_size", [(1, 1), (2, 17), (4, 64), (2, 256)])
def test_odd_sizes(head_dim, kv_heads, block_size):
    model = build("llama_gqa", head_dim=head_dim, num_key_value_heads=kv_heads, num_hidden_layers=2)
    rows = prompts((5, 17))
    want = [oracle(model, row, 8) for row in rows]
    ids, mask = padded(rows)
    out = paged(model, ids, mask, {"block_size": block_size}, max_new_tokens=8)
    assert [row[17:] for row in out.tolist()] == want


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "gpt2", "deepseek_v3"])
def test_whatever_attention_the_model_was_loaded_with(name, attn):
    model = build(name, attn=attn)
    ids, mask = padded(prompts())
    assert_rows_equal_prompts_alone(name, paged(model, ids, mask))
    assert model.config._attn_implementation == attn


def test_configs_that_name_their_sizes_differently():
    # No num_key_value_heads given, head_dim that is not hidden / heads, v_head_dim of 0 (CASES B42, B17).
    for name, changes in (
        ("llama_gqa", {"num_key_value_heads": None, "head_dim": 24}),
        ("gpt2", {"n_head": 8}),
        ("llama_gqa", {"v_head_dim": 0}),
    ):
        model = build(name, **changes)
        rows = prompts((5, 17))
        ids, mask = padded(rows)
        out = paged(model, ids, mask, max_new_tokens=8)
        assert [row[17:] for row in out.tolist()] == [oracle(model, row, 8) for row in rows]


def test_only_layers_that_own_keys_are_counted():
    model = shared("gemma3n")
    cache = hf_paged.PagedCache(model.config)
    paged_prompt = torch.tensor([prompts()[1]])
    model.generate(paged_prompt, max_new_tokens=2, do_sample=False, past_key_values=cache)
    assert cache.stats().num_layers == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_stay_near_plain(dtype):
    eager, sdpa = build("llama_gqa", dtype=dtype), build("llama_gqa", attn="sdpa", dtype=dtype)
    ids = torch.tensor([prompts()[2]])
    with torch.no_grad():
        logits = [model(ids).logits.float() for model in (eager, sdpa)]
        between = (logits[0] - logits[1]).abs().max()
        eager.set_attn_implementation("hf_paged")
        got = eager(ids, past_key_values=hf_paged.PagedCache(eager.config)).logits.float()
    assert (got - logits[0]).abs().max() <= 2 * between


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_at_once_by_chunks_and_token_by_token_agree(name):
    model = build(name)
    model.set_attn_implementation("hf_paged" if model._can_set_attn_implementation() else "eager")
    ids = torch.tensor([prompts()[1]])
    with torch.no_grad():
        for size in (17, 5, 1):
            caches = [hf_paged.PagedCache(model.config, {"block_size": 4}), DynamicCache(config=model.config)]
            got, plain = (
                torch.cat([runner(part, past_key_values=cache).logits for part in ids.split(size, dim=1)], dim=1)
                for runner, cache in zip((model, shared(name)), caches, strict=True)
            )
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=2e-4)
