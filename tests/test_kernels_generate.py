"""generate over pages gives the oracle's text with each backend, which the counts show to have run (CASES B14-B17).

Triton's interpreter takes about a millisecond for each operation of a program, so on a CPU it gets fewer models,
shorter prompts and fewer tokens; what it can do on all shapes is shown by the grid.
"""

import copy
import functools

import pytest
from kernel_grid import is_slow, targets
from tiny_models import (
    FAMILIES,
    PAGED_FAMILIES,
    PROMPT_LENGTHS,
    assert_rows_equal_prompts_alone,
    assert_same_text,
    build,
    oracle,
    oracles,
    padded,
    prompts,
    shared,
    text_alone,
)

import hf_paged
import hf_paged_kernels as kernels

TARGETS = targets()
# Grouped queries; softcap, odd scale and window; sinks and window; K and V that are not as long (gather).
SLOW_FAMILIES = ["llama_gqa", "gemma2", "gpt_oss", "deepseek_v3"]
ATTENTION = ("paged_prefill", "paged_decode")


def each(names):
    """Parameters backend, device, name: all names, or for a slow backend the few of SLOW_FAMILIES."""
    return [
        pytest.param(backend, device, name, id=f"{backend}-{device}-{name}")
        for backend, device in TARGETS
        for name in names
        if name in SLOW_FAMILIES or not is_slow(backend, device)
    ]


def generate(backend, device, model, rows, **settings):
    """New text of rows over pages by one backend, and how often each operator ran."""
    if device != "cpu":  # the oracle stays on the CPU
        model = copy.deepcopy(model).to(device)
    ids, mask = (tensor.to(device) for tensor in padded(rows))
    kernels.reset_op_calls()
    with kernels.backend(backend):
        settings = {"do_sample": False, "return_dict_in_generate": True, **settings}
        out = model.generate(ids, attention_mask=mask, cache_implementation="paged", **settings)
    assert isinstance(out.past_key_values, hf_paged.PagedCache)
    return out.sequences.cpu(), kernels.op_calls()


@pytest.mark.parametrize("backend, device, name", each(FAMILIES))
def test_the_zoo(backend, device, name):
    lengths, new = ((7, 17), 3) if is_slow(backend, device) else (PROMPT_LENGTHS, 24)
    rows, want = prompts(lengths), oracles(name, lengths, new)
    config = {"block_size": 4}
    out, ran = generate(backend, device, shared(name), rows, max_new_tokens=new, cache_config=config)
    assert_rows_equal_prompts_alone(name, out, rows, want)
    assert ran["reshape_and_cache"] and all(bool(ran[op]) == (name in PAGED_FAMILIES) for op in ATTENTION)


@pytest.mark.parametrize("block_size, chunk", [(4, None), (16, 3)])
@pytest.mark.parametrize("backend, device, name", each(["mistral_swa", "gemma3", "gpt_oss"]))
def test_prompts_around_the_window_whole_and_in_chunks(backend, device, name, block_size, chunk):
    if chunk is None and is_slow(backend, device):
        pytest.skip("under Triton's interpreter in chunks only: whole prompts are among test_the_zoo")
    lengths, new = ((7, 9), 3) if is_slow(backend, device) else ((1, 7, 8, 9, 17, 33), 24)
    rows, want = prompts(lengths), oracles(name, lengths, new)
    settings = {"max_new_tokens": new, "cache_config": {"block_size": block_size}, "prefill_chunk_size": chunk}
    out, ran = generate(backend, device, shared(name), rows, **settings)
    assert_rows_equal_prompts_alone(name, out, rows, want)
    assert ran["paged_prefill"] and ran["paged_decode"]


@functools.cache
def odd(head_dim, kv_heads):
    model = build("llama_gqa", head_dim=head_dim, num_key_value_heads=kv_heads, num_hidden_layers=2)
    return model, [oracle(model, row, 8) for row in prompts((5, 17))]


@pytest.mark.parametrize("head_dim", [8, 24, 80, 96, 120, 256])
@pytest.mark.parametrize("kv_heads, block_size", [(1, 1), (2, 17), (4, 64), (2, 256)])
@pytest.mark.parametrize("backend, device", [target for target in TARGETS if not is_slow(*target)])
def test_odd_sizes(backend, device, kv_heads, block_size, head_dim):
    model, want = odd(head_dim, kv_heads)
    rows = prompts((5, 17))
    settings = {"max_new_tokens": 8, "cache_config": {"block_size": block_size}}
    out, ran = generate(backend, device, model, rows, **settings)
    for prompt, row, text in zip(rows, out[:, 17:].tolist(), want, strict=True):
        assert_same_text(model, prompt, row, text)
    assert ran["paged_prefill"] == 2 and ran["paged_decode"] == 2 * 7


TEXTS = ["The capital of France is", "One, two, three, four, five,", "Water boils at a temperature of 100 degrees. Ice"]


@pytest.mark.demo_model
@pytest.mark.parametrize("backend, device", TARGETS)
def test_the_demo_model(backend, device, demo_model):
    model, tokenizer = demo_model
    texts, new = (TEXTS[:1], 2) if is_slow(backend, device) else (TEXTS, 16)
    rows = tokenizer(texts)["input_ids"]
    out, ran = generate(backend, device, model, rows, max_new_tokens=new)
    width = max(map(len, rows))
    for prompt, row in zip(rows, out[:, width:].tolist(), strict=True):
        assert_same_text(model, prompt, row, text_alone("the demo model", model, prompt, new))
    layers = model.config.num_hidden_layers
    assert ran["paged_prefill"] == layers and ran["paged_decode"] == layers * (new - 1)
    assert ran["reshape_and_cache"] == layers * new
