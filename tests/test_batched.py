"""generate(cache_implementation="paged") through a batcher: who takes that way, what it returns, what stays behind."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from tiny_models import (
    FAMILIES,
    PAGED_FAMILIES,
    assert_rows_equal_prompts_alone,
    build,
    oracles,
    padded,
    prompts,
    shared,
)
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import hf_paged
from hf_paged import attention, batched
from hf_paged import generate as generate_module

NEW = 16
PAGED = {"cache_implementation": "paged"}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def ways(monkeypatch):
    """For each paged call that could be handed to a batcher, whether it was."""
    seen, original = [], batched.sample_batched

    def spy(*args):
        result = original(*args)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(generate_module, "sample_batched", spy)
    return seen


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_their_prompts_alone(name, block_size, ways):
    ids, mask = padded(prompts())
    attention.calls.clear()
    out = shared(name).generate(ids, attention_mask=mask, cache_config={"block_size": block_size}, **GREEDY, **PAGED)
    assert_rows_equal_prompts_alone(name, out, want=[text[:NEW] for text in oracles(name)])
    if name in PAGED_FAMILIES and name != "qwen3_next":  # its linear attention keeps a state for each row of a batch
        assert ways == [True] and not attention.calls["dense"]
    batched.release(shared(name))


SAMPLED = [
    {},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    {"num_return_sequences": 3},
    {"eos_token_id": list(range(5, 60)), "pad_token_id": 3},
    {"repetition_penalty": 1.4, "min_new_tokens": 4, "eos_token_id": list(range(5, 60))},
    {"stop_strings": ["h"], "eos_token_id": 17},
]


def letters():
    """A tokenizer of 199 letters, token 7 an "h"."""
    vocabulary = {chr(97 + i if i < 26 else 256 + i): i for i in range(199)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("blocks", [None, 7])
@pytest.mark.parametrize("settings", SAMPLED, ids=str)
def test_sampling_draws_what_the_loop_draws_and_leaves_the_generator_there(settings, blocks, ways):
    """Seven blocks do not hold all rows at once: what waits, or is preempted, draws the same."""
    model, (ids, mask) = shared("llama_gqa"), padded(prompts())
    settings = {"do_sample": True, "max_new_tokens": NEW, "attention_mask": mask, **settings}
    if "stop_strings" in settings:
        settings["tokenizer"] = letters()
    results = []
    for extra in ({}, {**PAGED, "cache_config": {"num_blocks": blocks}}):
        torch.manual_seed(11)
        results.append((model.generate(ids, **settings, **extra), torch.rand(4)))
    (want, next_numbers), (got, got_numbers) = results
    assert torch.equal(got, want) and torch.equal(got_numbers, next_numbers)
    assert ways == [True]
    batched.release(model)


def test_a_pool_too_small_for_the_batch_serves_it_in_turns(ways):
    ids, mask = padded(prompts())
    out = shared("llama_gqa").generate(ids, attention_mask=mask, cache_config={"num_blocks": 4}, **GREEDY, **PAGED)
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])
    assert ways == [True]
    with pytest.raises(RuntimeError, match=r"needs \d+ blocks?, \d+ available of 2 .*num_blocks"):
        shared("llama_gqa").generate(ids, attention_mask=mask, cache_config={"num_blocks": 2}, **GREEDY, **PAGED)
    batched.release(shared("llama_gqa"))


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True},
        {"num_beams": 2},
        {"logits_processor": [lambda ids, scores: scores]},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4]},
        {"position_ids": None, "token_type_ids": torch.zeros(4, 33, dtype=torch.long)},
        {"guidance_scale": 1.5},
        {"stop_strings": ["h"], "tokenizer": letters(), "eos_token_id": None},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_concerns_the_whole_batch_keeps_to_the_loop(settings, ways):
    ids, mask = padded(prompts())
    assert mask.shape == (4, 33)
    try:
        shared("llama_gqa").generate(ids, attention_mask=mask, **GREEDY, **PAGED, **settings)
    except (TypeError, ValueError) as error:  # llama has no token types
        assert "token_type_ids" in str(error)
    assert not any(ways), "it was handed to a batcher"


def test_a_model_that_cannot_be_packed_keeps_to_the_loop(ways):
    model = shared("bloom")
    ids, mask = padded(prompts())
    out = model.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
    assert_rows_equal_prompts_alone("bloom", out, want=[text[:NEW] for text in oracles("bloom")])
    assert not any(ways)  # transformers 5.17 has a bloom of its own ways, which is not even handed over


def batcher_of(model):
    return vars(model)["_hf_paged_batchers"].batcher


def test_one_batcher_stays_until_something_changes():
    model = build("llama_gqa")
    ids, mask = padded(prompts())

    def run(**cache_config):
        model.generate(ids, attention_mask=mask, cache_config=cache_config, **GREEDY, **PAGED)
        return batcher_of(model)

    first = run()
    assert run() is first
    other = run(block_size=4)
    assert other is not first
    with pytest.raises(RuntimeError, match="closed"):
        first.step()
    model.to(torch.bfloat16)
    third = run(block_size=4)
    assert third is not other
    third.check_integrity()
    hf_paged.release(model)
    assert batcher_of(model) is None
    hf_paged.release(model)  # nothing left to do
    hf_paged.release(build("gpt2"))


def test_copies_pickles_and_state_dicts_of_a_model_do_not_carry_the_batcher():
    model = build("llama_gqa")
    ids, mask = padded(prompts())
    model.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert batcher_of(other) is None
        other.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
        assert batcher_of(other) is not batcher_of(model)
    assert not any("paged" in name for name in model.state_dict())


def test_a_collected_model_takes_its_batcher_along():
    model = build("llama_gqa")
    ids, mask = padded(prompts())
    model.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
    gone = weakref.ref(model), weakref.ref(batcher_of(model))
    del model
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_calls_of_several_threads_share_the_running_batch():
    model, texts, errors = build("llama_gqa"), oracles("llama_gqa"), []
    meet, together = threading.Barrier(4), []

    def call(row):
        try:
            meet.wait(timeout=60)
            for _ in range(3):
                out = model.generate(torch.tensor([prompts()[row]]), **GREEDY, **PAGED)
                assert out[0, len(prompts()[row]) :].tolist() == texts[row][:NEW]
        except BaseException as error:
            errors.append(error)

    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: together.append(args[0].shape[1]))
    threads = [threading.Thread(target=call, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert not errors
    # Alone they would take 3 steps of NEW tokens each.
    assert len(together) < 4 * 3 * NEW
    batcher_of(model).check_integrity()


def test_an_error_in_the_forward_is_the_callers_own_and_the_next_call_works():
    model = build("llama_gqa")
    ids, mask = padded(prompts())

    def fail(*args):
        raise ZeroDivisionError("on purpose")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        model.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
    handle.remove()
    out = model.generate(ids, attention_mask=mask, **GREEDY, **PAGED)
    assert_rows_equal_prompts_alone("llama_gqa", out, want=[text[:NEW] for text in oracles("llama_gqa")])
    batcher_of(model).check_integrity()
