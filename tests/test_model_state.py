"""A paged generate leaves the model, its configs and other threads as they were (CASES B28); register / unregister."""

import copy
import threading
import time

import pytest
import torch
from tiny_models import assert_rows_equal_prompts_alone, build, oracles, padded, prompts, shared
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.utils import GenerationMixin

import hf_paged
from hf_paged.switch import switches

NEW = 12
PAGED = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "paged"}


def state(model):
    return (
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        copy.deepcopy(model.config.to_dict()),
        copy.deepcopy(model.generation_config.to_dict()),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attn", ["eager", "sdpa", "hf_paged"])
def test_state_is_restored(training, attn):
    model = build("llama_gqa", attn=attn).train(training)
    model.model.layers[1].eval()  # a part that was frozen on purpose stays so
    ids, mask = padded(prompts())
    before = state(model)
    out = model.generate(ids, attention_mask=mask, **PAGED)
    assert state(model) == before
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])


@pytest.mark.parametrize("where", ["forward", "processor"])
def test_state_is_restored_after_an_error(where):
    model = build("llama_gqa").train()
    ids, mask = padded(prompts())
    before = state(model)

    def fail(*args, **kwargs):
        raise ZeroDivisionError("on purpose")

    extra = {"logits_processor": [fail]} if where == "processor" else {}
    handle = model.model.layers[2].register_forward_hook(fail) if where == "forward" else None
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, attention_mask=mask, **PAGED, **extra)
    if handle:
        handle.remove()
    assert state(model) == before
    assert not switches.active and not switches.in_paged_call
    out = model.generate(ids, attention_mask=mask, **PAGED)
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generating_inside_training_changes_no_gradient(checkpointing):
    models = [build("gpt2").train() for _ in range(2)]
    ids, mask = padded(prompts())
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    out = models[0].generate(ids, attention_mask=mask, **PAGED)
    want = [text[:NEW] for text in oracles("gpt2")]
    assert_rows_equal_prompts_alone("gpt2", out, want=want)
    for model in models:
        torch.manual_seed(0)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
    for mine, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.grad, right.grad)


def test_generate_inside_an_exception_handler():
    model = shared("llama_gqa")
    ids, mask = padded(prompts())
    try:
        raise KeyError("outer")
    except KeyError:
        out = model.generate(ids, attention_mask=mask, **PAGED)
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_plain_generate_in_another_thread_is_undisturbed(attn):
    model = build("llama_gqa", attn=attn)
    ids, mask = padded(prompts())
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want = model.generate(ids, attention_mask=mask, **settings)
    stop, failures, rounds = threading.Event(), [], [0, 0]

    def paged():
        while not stop.is_set():
            out = model.generate(ids, attention_mask=mask, **PAGED)
            rounds[0] += 1
            if out[:, ids.shape[1] :].tolist() != [text[:NEW] for text in oracles("llama_gqa")]:
                failures.append("paged")

    def plain():
        while not stop.is_set():
            out = model.generate(ids, attention_mask=mask, **settings)
            rounds[1] += 1
            same = torch.equal(out.sequences, want.sequences)
            if not same or not all(map(torch.equal, out.logits, want.logits)):
                failures.append("plain")

    oracles("llama_gqa")
    threads = [threading.Thread(target=target) for target in (paged, paged, plain)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120  # a busy machine is not a failure
    while min(rounds) < 3 and not failures and time.monotonic() < deadline:
        stop.wait(0.1)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures and min(rounds) >= 3
    assert model.config._attn_implementation == attn and not switches.active


def test_unregister_puts_transformers_back():
    names = ("generate", "_prepare_cache_for_generation", "_get_logits_processor")

    def snapshot():
        return (
            [GenerationMixin.__dict__[name] for name in names],
            dict(AttentionInterface._global_mapping),
            dict(AttentionMaskInterface._global_mapping),
        )

    registered = snapshot()
    hf_paged.register()
    assert snapshot() == registered  # idempotent
    hf_paged.unregister()
    plain = snapshot()
    hf_paged.unregister()
    try:
        assert snapshot() == plain
        assert all(function.__module__.startswith("transformers") for function in plain[0])
        assert "hf_paged" not in plain[1] and "hf_paged" not in plain[2]
        assert {key: value for key, value in registered[1].items() if key != "hf_paged"} == plain[1]
        ids, mask = padded(prompts())
        out = shared("llama_gqa").generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])
    finally:
        hf_paged.register()
    out = shared("llama_gqa").generate(ids, attention_mask=mask, **PAGED)
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])


def test_unregister_is_refused_while_a_paged_call_runs():
    model = shared("llama_gqa")
    ids, _ = padded(prompts())

    def processor(input_ids, scores):
        with pytest.raises(RuntimeError, match="still running"):
            hf_paged.unregister()
        return scores

    model.generate(ids, logits_processor=[processor], **PAGED)


def test_import_finds_nothing_else_changed():
    # The wrapped methods keep their names and signatures for those who inspect them.
    import inspect

    parameters = inspect.signature(GenerationMixin.generate).parameters
    assert {"inputs", "generation_config", "logits_processor", "streamer", "kwargs"} <= set(parameters)
    assert GenerationMixin.generate.__name__ == "generate"
