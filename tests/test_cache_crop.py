"""crop and reset of PagedCache, for every value, against the installed DynamicCache.

Contract: same lengths, same contents, same type of error; what follows a crop equals a DynamicCache that never saw
the removed tokens. Where the installed sliding-window layer would silently lose tokens or count below 0, a
PagedCache raises RuntimeError or stops at 0. A crop that raises changes nothing.
"""

from __future__ import annotations

import pytest
import torch
from cache_helpers import FAMILIES, RESET_FORGETS, WINDOW, Pair, config_of, outcome, random_kv

from hf_paged import PagedCache

LENGTH = 33
ALL_CROPS = range(-LENGTH - 2, LENGTH + 3)


def crop_both(pair: Pair, amount: int) -> None:
    """Crop both caches: same length, or same error and nothing changed."""
    expected = outcome(pair.dynamic.crop, amount)
    assert outcome(pair.paged.crop, amount) is expected, amount
    pair.trim(pair.length)
    pair.check_held()


def continue_and_compare(pair: Pair) -> None:
    pair.restart_oracle()
    for tokens in (1, 17):
        pair.update(tokens)
    pair.check_held()
    pair.paged.check_integrity()


@pytest.mark.parametrize("family, block_size", [("llama", 16), ("llama", 17), ("deepseek_v3", 1)])
def test_crop_of_full_layers_by_every_value(family, block_size):
    original = Pair(family, block_size=block_size)
    original.update(LENGTH)
    for amount in ALL_CROPS:
        pair = original.fork()
        crop_both(pair, amount)
        continue_and_compare(pair)
    original.check()  # every fork shared its blocks
    original.update(5)


def test_crop_of_full_layers_again_and_again():
    pair = Pair("llama", block_size=4)
    for tokens, amount in [(9, -2), (1, -1), (6, -6), (4, 0), (3, -40), (5, -5), (12, -11)]:
        pair.update(tokens)
        crop_both(pair, amount)
    continue_and_compare(pair)


@pytest.mark.parametrize("family", FAMILIES)
def test_crop_of_a_cache_that_was_never_fed_does_nothing(family):
    if family == "qwen3_next":
        pytest.skip("its linear attention layers refuse to crop")
    pair = Pair(family)
    for amount in (0, -1, -5):
        pair.paged.crop(amount)
        pair.check()
    pair.update(3)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("length", [1, 4, WINDOW - 1])
def test_crop_of_sliding_layers_below_their_window(family, length):
    for amount in range(-length - 2, length + 3):
        pair = Pair(family, block_size=4)
        pair.update(length)
        crop_both(pair, amount)
        continue_and_compare(pair)


@pytest.mark.parametrize("family, length", [("mistral", WINDOW), ("mistral", LENGTH), ("gemma3_text", LENGTH)])
def test_crop_beyond_the_window_without_recording_is_refused(family, length):
    pair = Pair(family, block_size=4)
    pair.update(length)
    theirs = pair.fork().dynamic
    for amount in ALL_CROPS:
        assert outcome(theirs.crop, amount) is outcome(pair.paged.crop, amount) is RuntimeError, amount
    pair.check()
    pair.update(2)


@pytest.mark.parametrize(
    "family, block_size, recorded_from",
    [("mistral", 4, 0), ("mistral", 4, 5), ("mistral", 1, 20), ("gemma3_text", 16, 0), ("gemma3_text", 4, 20)],
)
def test_crop_by_every_value_while_the_past_is_recorded(family, block_size, recorded_from):
    original = Pair(family, block_size=block_size)
    if recorded_from:
        original.update(recorded_from)
    original.both("activate_past_recording")
    for chunk in (9, LENGTH - recorded_from - 9):
        original.update(chunk)
    kept_from = max(0, recorded_from - WINDOW + 1)
    for amount in ALL_CROPS:
        pair, target = original.fork(), max(0, LENGTH + amount)
        if amount > 0 or (target and max(0, target - WINDOW + 1) < kept_from):
            # The installed layer refuses positive amounts, too; it would lose tokens in the other case.
            assert outcome(pair.paged.crop, amount) is RuntimeError, amount
            pair.check_held()
            continue
        pair.paged.crop(amount)
        if LENGTH + amount >= 0:  # the installed one would count on below 0
            pair.dynamic.crop(amount)
            pair.check_held()
        assert [pair.paged.get_seq_length(index) for index in range(3)] == [target] * 3
        pair.trim(target)
        continue_and_compare(pair)
        crop_both(pair, -4)  # still recording
    original.check()
    original.update(1)


def test_recorded_blocks_are_given_back_by_crop():
    pair = Pair("mistral", batch=1, block_size=4)
    pair.paged.activate_past_recording()
    pair.dynamic.activate_past_recording()
    for _ in range(10):
        pair.update(4)
    assert pair.paged.stats().blocks_held == 10
    crop_both(pair, -1)
    assert pair.paged.stats().blocks_held == 2  # columns 32 to 38 are in the window of column 39
    pair.update(1)


def test_crop_that_a_linear_attention_layer_refuses_changes_nothing():
    pair = Pair("qwen3_next")
    pair.update(9)
    for amount in (-2, 0, 2):
        assert outcome(pair.dynamic.crop, amount) is RuntimeError
        assert outcome(pair.paged.crop, amount) is RuntimeError
        assert pair.paged.get_seq_length(3) == 9
    pair.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_reset(family):
    pair = Pair(family)
    pair.update(21)
    pair.both("reset")
    for index in pair.attention:
        layer = pair.paged.layers[index]
        assert layer.get_seq_length() == pair.dynamic.layers[index].get_seq_length()
        assert layer.keys is None or not layer.keys.any() and not layer.values.any()
    if RESET_FORGETS:
        pair.check()
        assert pair.paged.stats().blocks_held == 0
    if RESET_FORGETS or not any(pair.dynamic.is_sliding):  # 5.17 leaves 7 zeros in a window of length 0
        pair.update(7)
        pair.check()


@pytest.mark.skipif(not RESET_FORGETS, reason="this transformers keeps the old tensors, and with them the batch size")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gemma3n_text", "deepseek_v3"])
def test_after_reset_another_batch_and_shape_may_follow(family):
    pair = Pair(family)
    pair.update(21)
    for batch, shape in ((3, pair.shape), (1, (1, 8, 5))):
        pair.both("reset")
        pair.batch, pair.shape, pair.fed = batch, shape, {}
        pair.update(9)
        pair.check()


def test_reset_leaves_a_fork_as_it_was():
    pair = Pair("llama", block_size=4)
    pair.update(10)
    fork = pair.fork()
    pair.paged.reset()
    fork.check()
    pair.paged.update(*random_kv(2, 12), 0)
    fork.update(3)
    fork.check()


@pytest.mark.skipif(not RESET_FORGETS, reason="this transformers keeps the length of every layer")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_layer_not_yet_fed_after_a_reset_is_empty(family):
    cache = PagedCache(config_of(family))
    for index in range(3):
        cache.update(*random_kv(2, 9), index)
    cache.reset()
    cache.update(*random_kv(2, 4), 0)
    assert cache.get_seq_length(1) == 0
    assert cache.get_mask_sizes(4, 1) == (4, 0)
    assert cache.layers[1].keys is None and not cache.layers[1].is_initialized
    assert "length=0" in repr(cache.layers[1])
    assert repr(cache) == "PagedCache(3 PagedLayer; 2 rows of 4 columns, block_size=16)"
    cache.crop(-1)
    assert [cache.get_seq_length(index) for index in range(3)] == [3, 0, 0]


def test_crop_and_reset_keep_their_hands_off_left_padding():
    cache = PagedCache(config_of("llama"), {"block_size": 4})
    cache.expect(torch.tensor([[0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]]))
    states = [random_kv(2, 6), random_kv(2, 5)]
    cache.update(*states[0], 0)
    cache.crop(-3)  # into the padding of row 0
    cache.update(*states[1], 0)
    keys = cache.layers[0].keys
    assert torch.equal(keys[1], torch.cat([states[0][0][1, :, :3], states[1][0][1]], 1))
    assert not keys[0, :, :3].any() and torch.equal(keys[0, :, 3:], states[1][0][0])
    cache.check_integrity()
