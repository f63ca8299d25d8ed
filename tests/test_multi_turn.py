"""One cache over several generate calls gives the text of a cache made anew (CASES B32, B33)."""

import copy
import gc

import pytest
import torch
from tiny_models import assert_same_text, build, oracle, padded, prompts, shared

import hf_paged
from hf_paged import attention

FAMILIES = ["llama_gqa", "mistral_swa", "gemma3", "gpt2", "qwen3_next", "deepseek_v3", "gemma3n"]
NEW = 7


def run(model, ids, cache, mask=None, new=NEW, **kwargs):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, past_key_values=cache, **kwargs
    )


def plain(model, ids, new=NEW):
    return model.generate(ids, max_new_tokens=new, do_sample=False)


def ones(rows, columns):
    return torch.ones(rows, columns, dtype=torch.long)


@pytest.fixture(params=["registered", "unregistered"])
def patched(request):
    """The same with and without the wrapped generate: a PagedCache needs no patch."""
    if request.param == "unregistered":
        hf_paged.unregister()
    yield request.param == "registered"
    hf_paged.register()


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_of_one_conversation(name, patched):
    model = shared(name)
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    text = torch.tensor([prompts()[1]])
    for turn in range(3):
        out = run(model, text, cache)
        assert torch.equal(out, plain(model, text)), f"turn {turn}"
        assert cache.get_seq_length() == out.shape[1] - 1
        text = torch.cat([out, torch.tensor([[9, 8, 7 + turn]])], dim=1)
    cache.check_integrity()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_of_a_batch_of_unequal_lengths(name, side):
    model = shared(name)
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    rows = prompts((5, 17, 12))
    text, mask = padded(rows, side)
    for turn in range(3):
        out = run(model, text, cache, mask)
        assert torch.equal(out[:, : text.shape[1]], text)
        for index in range(3):
            alone = text[index][mask[index].bool()].tolist()
            want = oracle(model, alone, NEW)
            assert_same_text(model, alone, out[index, text.shape[1] :].tolist(), want)
        said, said_mask = padded([[9, 8, 7], [5 + turn], [3, 4]], side)
        text = torch.cat([out, said], dim=1)
        mask = torch.cat([mask, ones(3, NEW), said_mask], dim=1)
    cache.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
def test_two_continuations_of_a_copied_cache(name, patched):
    model = shared(name)
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    start = run(model, torch.tensor([prompts()[2]]), cache)
    twin = copy.deepcopy(cache)
    used = cache.stats().blocks_used
    assert twin.stats().blocks_used <= used  # shared, not copied
    first = torch.cat([start, torch.tensor([[9, 8, 7, 6, 5]])], dim=1)
    second = torch.cat([start, torch.tensor([[4, 5]])], dim=1)
    assert torch.equal(run(model, first, cache), plain(model, first))
    assert torch.equal(run(model, second, twin), plain(model, second))
    cache.check_integrity()
    held = cache.stats().blocks_held
    del twin
    gc.collect()
    assert cache.stats().blocks_used == held


@pytest.mark.parametrize("name", FAMILIES)
def test_one_cache_continued_twice_and_by_a_shorter_prompt(name):
    model = shared(name)
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    prompt = torch.tensor([prompts()[2]])
    start = run(model, prompt, cache)
    first = torch.cat([start, torch.tensor([[9, 8, 7, 6, 5]])], dim=1)
    second = torch.cat([start, torch.tensor([[4, 5]])], dim=1)
    for text in (first, second, prompt[:, :20], first, first, prompt[:, :1]):
        assert torch.equal(run(model, text, cache), plain(model, text))
    cache.check_integrity()


def test_only_the_common_start_is_kept():
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config)
    prompt = torch.tensor([prompts()[2]])
    run(model, prompt, cache)
    other = prompt.clone()
    other[0, 20:] = torch.arange(20, 33) + 100
    seen = []
    handle = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        out = run(model, other, cache)
    finally:
        handle.remove()
    assert torch.equal(out, plain(model, other))
    assert seen[0] == 13  # the 20 common tokens were not computed again


def test_cache_with_a_mask_and_only_the_new_tokens():
    model = shared("llama_gqa")
    rows = prompts((5, 17, 12))
    text, mask = padded(rows)
    cache = hf_paged.PagedCache(model.config)
    out = run(model, text, cache, mask)
    said = torch.tensor([[9, 8], [5, 6], [3, 4]])
    mask = torch.cat([mask, ones(3, NEW + 2)], dim=1)
    got = run(model, torch.cat([out[:, -1:], said], dim=1), cache, mask)
    whole = torch.cat([out, said], dim=1)
    for index in range(3):
        alone = whole[index][mask[index].bool()].tolist()
        assert got[index, 3:].tolist() == oracle(model, alone, NEW)


def test_cache_longer_than_the_prompt_without_known_tokens():
    model = shared("llama_gqa")
    cache = hf_paged.PagedCache(model.config)
    with torch.no_grad():
        model(torch.tensor([prompts()[2]]), past_key_values=cache)
    with pytest.raises(ValueError, match="holds 33 tokens and input_ids has 20"):
        run(model, torch.tensor([prompts()[2][:20]]), cache)


def test_masks_that_show_padding_which_was_not_kept():
    model = shared("llama_gqa")
    text, mask = padded(prompts())
    cache = hf_paged.PagedCache(model.config)
    out = run(model, text, cache, mask)
    longer = torch.cat([out, torch.full((4, 1), 9)], dim=1)
    # generate knows what the cache was made of, and computes anew what the mask now shows
    want = model.generate(longer, attention_mask=ones(4, 41), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(run(model, longer, cache, ones(4, 41)), want)
    for attn in ("hf_paged", "dense"):
        model = build("llama_gqa", attn="hf_paged")
        cache = hf_paged.PagedCache(model.config)
        run(model, text, cache, mask)
        shown = ones(4, 40)
        if attn == "dense":
            shown[2, 20] = 0  # a hole sends attention to the dense path
        with pytest.raises(ValueError, match="row 0.* 28 columns are padding"), torch.no_grad():
            model(out[:, -1:], attention_mask=shown, past_key_values=cache)


MASKS = {
    "all real": lambda mask: None,
    "padding": lambda mask: mask[:, :8].zero_(),
    "a hole": lambda mask: mask[:, 10:14].zero_(),
    "right padding": lambda mask: mask[:, -3:].zero_(),
}


@pytest.mark.parametrize("second", MASKS)
@pytest.mark.parametrize("first", MASKS)
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa"])
def test_the_same_tokens_under_another_mask(name, first, second):
    model, text = shared(name), torch.tensor([prompts()[2]])
    cache = hf_paged.PagedCache(model.config, {"block_size": 4})
    for step, change in enumerate((first, second)):
        mask = ones(1, 33)
        MASKS[change](mask)
        ids = torch.cat([text, torch.full((1, 2 * step), 9)], dim=1)
        mask = torch.cat([mask, ones(1, 2 * step)], dim=1)
        got = run(model, ids, cache, mask)[0, ids.shape[1] :].tolist()
        assert got == oracle(model, ids[mask.bool()].tolist(), NEW), f"call {step + 1}"


def test_other_inputs_than_tokens_are_not_taken_for_the_same():
    model, text = shared("llama_gqa"), torch.tensor([prompts()[2]])
    cache = hf_paged.PagedCache(model.config)
    run(model, text, cache)
    positions = {"position_ids": torch.arange(33)[None] * 3}
    want = model.generate(text, max_new_tokens=NEW, do_sample=False, **positions)
    assert torch.equal(run(model, text, cache, **positions), want)
    assert torch.equal(run(model, text, cache), plain(model, text))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("operation", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_a_cache_whose_rows_were_moved_goes_on(operation, side):
    model = shared("llama_gqa")
    text, mask = padded(prompts((5, 17, 12)), side)
    cache = hf_paged.PagedCache(model.config)
    out = run(model, text, cache, mask)
    index = {"reorder_cache": [2, 0, 1], "batch_select_indices": [1, 2], "batch_repeat_interleave": [0, 0, 1, 1, 2, 2]}
    index = index[operation]
    getattr(cache, operation)(2 if operation == "batch_repeat_interleave" else torch.tensor(index))
    longer = torch.cat([out[index], torch.tensor([[9, 8, 7]] * len(index))], dim=1)
    mask = torch.cat([mask[index], ones(len(index), NEW + 3)], dim=1)
    got = run(model, longer, cache, mask)[:, longer.shape[1] :].tolist()
    assert got == [oracle(model, row[real.bool()].tolist(), NEW) for row, real in zip(longer, mask, strict=True)]


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "qwen3_next"])
def test_a_call_that_was_interrupted_can_be_repeated(name):
    model = shared(name)
    cache = hf_paged.PagedCache(model.config)
    out = run(model, torch.tensor([prompts()[1]]), cache)
    longer = torch.cat([out, torch.tensor([[9, 8, 7, 6]])], dim=1)
    for after in (0, 3):
        calls = []

        def interrupt(*_, calls=calls, after=after):
            calls.append(1)
            if len(calls) > after:
                raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, longer, cache)
        handle.remove()
        cache.check_integrity()
        assert torch.equal(run(model, longer, cache), plain(model, longer))


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_samples_of_each_prompt_go_on(side):
    model = shared("llama_gqa")
    text, mask = padded(prompts((5, 17, 12)), side)
    cache = hf_paged.PagedCache(model.config)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(0)
    out = model.generate(text, past_key_values=cache, **call)
    longer = torch.cat([out, torch.full((6, 2), 9)], dim=1)
    mask = torch.cat([mask.repeat_interleave(2, dim=0), ones(6, NEW + 2)], dim=1)
    got = run(model, longer, cache, mask)[:, longer.shape[1] :].tolist()
    assert got == [oracle(model, row[real.bool()].tolist(), NEW) for row, real in zip(longer, mask, strict=True)]


def test_a_cache_that_beams_have_used_is_known_no_longer():
    model = shared("llama_gqa")
    text, mask = padded(prompts((5, 17)), "right")
    cache = hf_paged.PagedCache(model.config)
    out = run(model, text, cache, mask, num_beams=3)
    with pytest.raises(ValueError, match="no token is left to compute"):
        run(model, text.repeat_interleave(3, dim=0), cache, mask.repeat_interleave(3, dim=0))
    assert out.shape == (2, 17 + NEW)
    cache.clear()
    again = run(model, text, cache, mask)
    assert again[:, 17:].tolist() == [oracle(model, row, NEW) for row in prompts((5, 17))]


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_a_first_call_that_failed_can_be_repeated(layer, after):
    model, cache, calls = shared("llama_gqa"), hf_paged.PagedCache(shared("llama_gqa").config), []
    text = torch.tensor([prompts()[2]])

    def fail(*_):
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError

    handle = model.model.layers[layer].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model, text, cache)
    handle.remove()
    assert torch.equal(run(model, text, cache), plain(model, text))


def test_embeddings_of_the_whole_text_over_a_cache():
    model = shared("llama_gqa")
    embed = model.get_input_embeddings()
    text, mask = padded(prompts((5, 17, 12)))
    cache = hf_paged.PagedCache(model.config)
    out = run(model, text, cache, mask)
    said, said_mask = padded([[9, 8, 7], [5], [3, 4]])
    longer, mask = torch.cat([out, said], dim=1), torch.cat([mask, ones(3, NEW), said_mask], dim=1)
    got = model.generate(
        inputs_embeds=embed(longer).detach(),
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert got.tolist() == [
        oracle(model, row[real.bool()].tolist(), NEW) for row, real in zip(longer, mask, strict=True)
    ]


def test_cache_that_generate_returned_goes_on():
    model = shared("gemma2")
    text = torch.tensor([prompts()[1]])
    out = model.generate(
        text, max_new_tokens=NEW, do_sample=False, cache_implementation="paged", return_dict_in_generate=True
    )
    longer = torch.cat([out.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    attention.calls.clear()
    assert torch.equal(run(model, longer, out.past_key_values), plain(model, longer))
    assert attention.calls["paged"] == NEW * 3 and not attention.calls["dense"]


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa"])
def test_assisted_decoding_rolls_back(name):
    model, assistant = shared(name), shared("llama_mqa")
    ids = torch.tensor([prompts()[2]])
    want = plain(model, ids, 24)
    paged = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "paged"}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **paged), want)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **paged), want)
