"""PagedCache over 8-bit blocks: what it holds, bit for bit, and what is generated over it in transformers' own loop.

The oracle is `QuantizedCache`, which is contiguous and knows of no block: see `quantized_reference`.
"""

import copy

import pytest
import torch
from cache_helpers import RESET_FORGETS, WINDOW, Pair, config_of, random_kv
from quantized_reference import (
    SETTINGS,
    QuantizedCache,
    double,
    logits_over,
    random_text,
    read_back,
    reference,
    same_text,
    scaled_keys,
    single,
    text,
)
from tiny_models import build, padded, prompts, shared

import hf_paged_kernels as kernels
from hf_paged import PagedCache, PagedCacheConfig
from hf_paged.kv_pages import LayerPages

NEW = 10
PLAIN = {"do_sample": False, "max_new_tokens": NEW}


class QuantizedPair(Pair):
    """A PagedCache beside a contiguous cache of the same 8-bit formats.

    Bit for bit where keys are kept as they come. A rotation sums in the order that a matrix product takes, so where
    keys are rotated, float64 throughout and a tolerance of its rounding stand in for that.
    """

    def __init__(self, family, setting, rotated=False, **options) -> None:
        self.rotated = rotated
        settings = SETTINGS[setting] if rotated else SETTINGS[setting] | {"rotate_keys": False}
        if rotated:
            options = {"dtype": torch.float64, **options}
        super().__init__(family, **settings, **options)
        self.settings = settings
        self.dynamic = QuantizedCache(self.config, **settings)

    def same(self, mine, other) -> bool:
        if not self.rotated:
            return super().same(mine, other)
        return mine.shape == other.shape and torch.allclose(mine, other, rtol=1e-12, atol=1e-12)

    def restart_oracle(self) -> None:
        self.dynamic = QuantizedCache(self.config, **self.settings)
        for index, states in self.fed.items():
            self.dynamic.update(*states, index)


# What it holds


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3", "gpt2"])
def test_what_it_gives_back_is_what_8_bits_keep(family, setting, rotated):
    pair = QuantizedPair(family, setting, rotated, block_size=4)
    for tokens in (1, 7, 4, 1, 13, 1):
        pair.update(tokens)
        pair.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    pair = QuantizedPair("llama", "mixed", dtype=dtype)
    for tokens in (5, 1, 17):
        pair.update(tokens)
    pair.check()


def test_nan_and_infinity_stay_visible_and_harm_no_other_row():
    for name in ("fp8_e4m3", "fp8_e5m2", "int8"):
        cache = PagedCache(config_of("llama"), {"kv_cache_dtype": name, "rotate_keys": False})
        key, value = random_kv(2, 5)
        bad = key.clone()
        bad[0, 1, 3, 2], bad[0, 0, 1, 0], bad[0, 0, 2, 1] = float("nan"), float("inf"), -float("inf")
        got, _ = cache.update(bad, value, 0)
        got, right = got + 0, read_back(bad, name)
        assert torch.equal(got.nan_to_num(7), right.nan_to_num(7))
        assert got[0, 1, 3, 2].isnan() and not got[0, 0, 1, 0].isfinite() and not got[0, 0, 2, 1].isfinite()
        assert torch.equal(got[1], read_back(key, name)[1]) and got.isfinite().sum() == got.numel() - 3


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_number_that_is_none_spoils_its_rotated_key_and_no_other(name, number):
    key, value = random_kv(2, 5)
    bad = key.clone()
    bad[0, 1, 3, 2] = number
    got, right = (
        PagedCache(config_of("llama"), {"kv_cache_dtype": name}).update(keys, value, 0)[0] + 0 for keys in (bad, key)
    )
    assert not got[0, 1, 3].isfinite().any()
    got[0, 1, 3] = right[0, 1, 3]
    assert torch.equal(got, right)


def test_autocast_does_not_round_keys_before_8_bits_do():
    key, value = random_kv(2, 5)
    read = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            read.append(PagedCache(config_of("llama"), {"kv_cache_dtype": "int8"}).update(key, value, 0)[0] + 0)
    assert torch.equal(*read)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("setting", ["fp8_e4m3", "mixed", "by_layer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_codes_and_scales_move_together(family, setting, rotated):
    """CASES B38: reorder, repeat, select, crop, fork, then write on, at every offset of a block."""
    for length in (1, 8, 15):
        pair = QuantizedPair(family, setting, rotated, batch=3, block_size=8)
        pair.update(length)
        pair.take_rows("reorder_cache", torch.tensor([2, 0, 0]), torch.tensor([2, 0, 0]))
        pair.update(1)
        twin = pair.fork()
        pair.take_rows("batch_repeat_interleave", 2, torch.tensor([0, 0, 1, 1, 2, 2]))
        pair.update(3)
        pair.take_rows("batch_select_indices", torch.tensor([5, 1]), torch.tensor([5, 1]))
        pair.update(1)
        twin.update(9)
        for one in (twin, pair):
            one.check()


@pytest.mark.parametrize("setting", ["fp8_e5m2", "int8", "keys_alone"])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_writing_into_a_shared_block_copies_scales_with_codes(setting, length):
    pair = QuantizedPair("llama", setting)
    pair.update(length)
    twin = pair.fork()
    pair.update(2)
    twin.update(1)
    third = pair.fork()
    pair.both("crop", -1)
    pair.update(4)
    for one in (twin, third, pair):
        one.check()


@pytest.mark.parametrize("setting", ["fp8_e4m3", "by_layer"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_crop_and_reset(family, setting):
    for cut in (1, 3, 5):
        pair = QuantizedPair(family, setting, block_size=4)
        pair.both("activate_past_recording")
        for tokens in (WINDOW + 3, 6):
            pair.update(tokens)
        pair.both("crop", -cut)
        pair.check_held()
        pair.update(1)
        pair.check_held()
        if family == "mistral" and not RESET_FORGETS:
            continue  # that version keeps the length of a window and nothing in it
        pair.both("reset")
        pair.check_held()
        pair.update(5)
        pair.check_held()


def test_a_pool_that_grows_keeps_codes_and_scales():
    pair = QuantizedPair("llama", "mixed", block_size=2)
    sizes = []
    for _ in range(6):
        pair.update(17)
        sizes.append(pair.paged.stats().blocks_total)
        pair.check_held()
    assert sizes[-1] > sizes[0]


def test_every_byte_is_reported():
    cache = PagedCache(config_of("llama"), {"kv_cache_dtype": "fp8_e4m3", "block_size": 8})
    for layer in range(3):
        cache.update(*random_kv(1, 20, (2, 64, 64), torch.bfloat16), layer)
    stats, tensors = cache.stats(), list(cache.storages())
    assert len(tensors) == 3 * 4  # keys, values and their scales
    assert stats.bytes_total == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    token = 2 * (64 + 4) * 2
    assert (stats.bytes_held, stats.bytes_of_tokens) == (3 * 8 * 3 * token, 20 * 3 * token)


def test_slots_that_were_never_written_show():
    """What the trials of packing and compiling fill pools with is NaN in every format."""
    for setting in SETTINGS.values():
        kept = PagedCacheConfig(**setting).formats.format_of(0)
        pages = LayerPages((2, 2, 4), (8, 6), torch.bfloat16, torch.device("cpu"), kept)
        pages.fill_with_nan()
        for which in (0, 1):
            assert pages.gather(which, torch.arange(8)[None], torch.bfloat16).isnan().all()
        pages.zero_blocks(torch.tensor([1]))
        for which in (0, 1):
            dense = pages.gather(which, torch.tensor([[3, 4, 7, -1]]), torch.bfloat16)
            assert dense[:, :, 0].isnan().all() and not dense[:, :, 1:].any()


# What is generated over it, in transformers' loop


def over(model, rows, settings, **options) -> torch.Tensor:
    """New tokens of `generate` over a PagedCache in the loop over the whole batch."""
    ids, mask = padded(rows)
    cache = PagedCache(model.config, {"block_size": 4, **settings})
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, **(PLAIN | options))
    return out[:, ids.shape[1] :]


MODELS = ["llama_gqa", "mistral_swa", "gemma2", "gpt2", "deepseek_v3"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_text_of_a_padded_batch(name, setting):
    rows = prompts((5, 17))
    got = over(double(name), rows, SETTINGS[setting]).tolist()
    assert got == [reference(name, row, setting, NEW) for row in rows]


@pytest.mark.parametrize("name, setting", [("llama_gqa", "fp8_e4m3"), ("gemma2", "int8"), ("deepseek_v3", "mixed")])
def test_text_in_float32(name, setting):
    rows = prompts((5, 17, 12))
    for row, got in zip(rows, over(single(name), rows, SETTINGS[setting]).tolist(), strict=True):
        same_text(name, row, got, setting)


@pytest.mark.parametrize("setting", ["fp8_e4m3", "mixed"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "deepseek_v3"])
def test_beam_search(name, setting, through_loop):
    model, settings = double(name), SETTINGS[setting]
    ids = torch.tensor(prompts((16, 16)))
    options = {**PLAIN, "num_beams": 3, "num_return_sequences": 2}
    with torch.no_grad():
        want = model.generate(ids, past_key_values=QuantizedCache(model.config, **settings), **options)
        got = model.generate(ids, cache_implementation="paged", cache_config=settings, **options)
    assert torch.equal(got, want)


def test_assisted_decoding_crops():
    name = "llama_gqa"
    assistant = build(name, num_hidden_layers=1, dtype=torch.float64)
    row = prompts((17,))[0]
    got = over(double(name), [row], SETTINGS["fp8_e4m3"], assistant_model=assistant)[0].tolist()
    assert got == reference(name, row, "fp8_e4m3", NEW)


def test_two_turns_and_a_fork_between_them():
    model, settings, row = double("llama_gqa"), SETTINGS["int8"], prompts((15,))[0]
    cache = PagedCache(model.config, settings)
    ids = torch.tensor([row])
    first = model.generate(ids, past_key_values=cache, **PLAIN)
    twin = copy.deepcopy(cache)
    for tail, held in (([5, 9, 4], cache), ([8, 3], twin)):
        prompt = [*first[0].tolist(), *tail]
        out = model.generate(torch.tensor([prompt]), past_key_values=held, **PLAIN)[0, len(prompt) :].tolist()
        assert out == text(model, prompt, settings, NEW)


def test_another_attention_reads_the_same_numbers():
    """A model that was not switched attends to dense copies, which hold what the blocks hold."""
    model, settings, row = double("llama_gqa"), SETTINGS["fp8_e4m3"], random_text(20, 3)
    cache = PagedCache(model.config, settings)
    with torch.no_grad():
        dense = model(torch.tensor([row]), past_key_values=cache).logits[0]
    assert torch.allclose(dense, logits_over(model, row, settings), atol=1e-4)


def test_gradients_reach_the_new_tokens_as_they_were_computed():
    model, settings = build("llama_gqa"), SETTINGS["int8"]
    row = random_text(12, 4)
    cache = PagedCache(model.config, settings)
    whole = model(torch.tensor([row]), past_key_values=cache).logits[0]
    assert torch.allclose(whole, logits_over(model, row, None), atol=1e-4)  # nothing of it is rounded
    whole.sum().backward()
    assert all(layer.self_attn.k_proj.weight.grad.abs().sum() > 0 for layer in model.model.layers)
    with torch.no_grad():
        after = model(torch.tensor([[7]]), past_key_values=cache).logits[0]
    assert not torch.allclose(after, logits_over(model, [*row, 7], None)[-1:], atol=1e-4)  # it is, for who comes later


# The scales are of the tokens themselves


def test_perplexity_does_not_depend_on_what_was_served_before():
    """CASES B39: cold, after one token, after 400 tokens, with the keys twice as large; scales are of each token."""
    name, settings, row = "llama_gqa", {"kv_cache_dtype": "fp8_e4m3"}, random_text(96, 5)

    def perplexity(model, before: int = 0) -> float:
        if before:
            served = torch.tensor([random_text(before, 6)])
            model.generate(
                served, max_new_tokens=1, do_sample=False, cache_implementation="paged", cache_config=settings
            )
        cache = PagedCache(model.config, settings)
        with torch.no_grad():
            logits = model(torch.tensor([row]), past_key_values=cache).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:])).exp())

    model = build(name)
    cold = perplexity(model)
    assert cold != pytest.approx(perplexity_of(logits_over(model, row, None), row), rel=1e-5)  # it is rounded
    assert perplexity(model, 1) == perplexity(model, 400) == cold
    for factor in (2.0, 64.0, 1 / 4096, 3.0):
        assert perplexity(scaled_keys(name, factor)) == pytest.approx(cold, rel=1e-5 if factor != 3 else 0.01)


def perplexity_of(logits: torch.Tensor, row: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:])).exp())


def test_no_dense_copy_on_the_way_of_the_operators(monkeypatch):
    """A step over 8-bit blocks gathers nothing, and dequantises nothing outside of the operators."""
    model, ids = shared("llama_gqa"), torch.tensor([random_text(33, 7)])
    gathered, real = [], LayerPages.gather
    monkeypatch.setattr(LayerPages, "gather", lambda *args: gathered.append(args) or real(*args))
    kernels.reset_op_calls()
    for settings in (SETTINGS["fp8_e4m3"], SETTINGS["by_layer"]):
        cache = PagedCache(model.config, settings)
        model.generate(ids, past_key_values=cache, **PLAIN)
    calls = kernels.op_calls()
    assert not gathered
    assert calls["reshape_and_cache"] == 2 * 3 * NEW and calls["paged_decode"] == 2 * 3 * (NEW - 1)
    assert calls["paged_prefill"] == 2 * 3
