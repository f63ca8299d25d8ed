"""Beams and returned sequences share their prompt's blocks (issue: under 1.3 times one beam's; CASES B21 in part)."""

import pytest
import torch
from tiny_models import padded, prompts, shared

from hf_paged import PagedCache


class HeldBlocks:
    """Largest number of blocks that a cache held during a call."""

    def __init__(self, model):
        self.model, self.most, self.cache = model, 0, None

    def __call__(self, module, args, kwargs, output):
        self.cache = kwargs["past_key_values"]
        self.most = max(self.most, self.cache.stats().blocks_held)
        self.cache.check_integrity()

    def __enter__(self):
        self.handle = self.model.register_forward_hook(self, with_kwargs=True)
        return self

    def __exit__(self, *error):
        self.handle.remove()


def run(model, ids, new, **settings):
    with HeldBlocks(model) as held:
        out = model.generate(ids, max_new_tokens=new, cache_implementation="paged", **settings)
    return out, held


def test_four_beams_hold_little_more_than_one(through_loop):
    model = shared("llama_gqa")
    ids = torch.tensor(prompts((512 - 40,), seed=3))  # the model has 512 positions
    settings = {"do_sample": False}
    one, alone = run(model, ids, 32, **settings)
    four, beams = run(model, ids, 32, num_beams=4, **settings)
    assert torch.equal(four, model.generate(ids, max_new_tokens=32, num_beams=4, **settings))
    assert alone.most == -(-(472 + 31) // 16)
    assert beams.most < 1.3 * alone.most


def test_prompt_of_512_and_32_new_tokens_counted(through_loop):
    model = shared("qwen2")
    ids = torch.tensor(prompts((512,), seed=3))
    _, alone = run(model, ids, 32, do_sample=False)
    _, beams = run(model, ids, 32, num_beams=4, do_sample=False)
    assert alone.most == 34 and beams.most < 1.3 * 34


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "gemma3", "deepseek_v3", "bloom"])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_beam_search_equals_plain(name, length):
    model = shared(name)
    ids = torch.tensor(prompts((length,), seed=length))
    for early_stopping, returned in ((False, 1), (True, 4)):
        settings = {
            "num_beams": 4,
            "num_return_sequences": returned,
            "early_stopping": early_stopping,
            "do_sample": False,
            "max_new_tokens": 12,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        want = model.generate(ids, **settings)
        got = model.generate(ids, cache_implementation="paged", **settings)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-4, atol=1e-4)


def test_batch_of_beams_with_padding():
    model = shared("mistral_swa")
    ids, mask = padded(prompts())
    settings = {"attention_mask": mask, "num_beams": 3, "do_sample": False}
    got, held = run(model, ids, 24, **settings)
    assert torch.equal(got, model.generate(ids, max_new_tokens=24, **settings))
    used = held.cache.stats()
    assert used.blocks_used == used.blocks_held  # nothing of dropped beams stays


def test_samples_of_one_prompt_store_it_once(through_loop):
    model = shared("llama_gqa")
    ids = torch.tensor(prompts((160,), seed=9))
    _, alone = run(model, ids, 8, do_sample=False)
    torch.manual_seed(0)
    _, samples = run(model, ids, 8, do_sample=True, num_return_sequences=8)
    assert alone.most == 11 and samples.most <= 10 + 8


def test_a_pool_with_just_enough_blocks_and_one_too_few():
    model = shared("llama_gqa")
    ids = torch.tensor(prompts((33,)))
    settings = {"num_beams": 4, "do_sample": False}
    want, held = run(model, ids, 12, **settings)
    enough, _ = run(model, ids, 12, cache_config={"num_blocks": held.most}, **settings)
    assert torch.equal(enough, want)
    with pytest.raises(RuntimeError, match="needs .* available of"):
        run(model, ids, 12, cache_config={"num_blocks": held.most - 1}, **settings)


def test_rows_that_only_look_alike_are_stored_apart():
    # The same tokens, but a hook makes the rows differ from the second layer on.
    model = shared("llama_gqa")
    ids = torch.tensor(prompts((21,))).repeat(2, 1)
    scale = torch.tensor([1.0, 0.5])[:, None, None]
    handle = model.model.layers[0].register_forward_hook(
        lambda _, args, out: (out[0] * scale, *out[1:]) if isinstance(out, tuple) else out * scale
    )
    try:
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
            cache = PagedCache(model.config, {"block_size": 4})
            cache.expect(shared_rows=2)
            parts = [model(part, past_key_values=cache).logits for part in ids.split(6, dim=1)]
    finally:
        handle.remove()
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=1e-4, atol=1e-4)
    cache.check_integrity()
