"""PagedCache against the installed DynamicCache: update, lengths, lazy tensors, gradients, random operations.

Contract: whatever a DynamicCache of the same config answers after the same operations, a PagedCache answers too, bit
for bit. (`crop` and `reset` by every value are in test_cache_crop.py.)
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_helpers import FAMILIES, WINDOW, Pair, config_of, random_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_paged import PagedCache

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

# Update, and what a cache says of itself


@pytest.mark.parametrize("block_size", [1, 4, 16, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_dynamic_cache_when_fed_in_chunks(family, block_size):
    pair = Pair(family, block_size=block_size)
    pair.check()  # before the first token
    for tokens in (1, 3, 17, 1, 0, 1, 12):
        pair.update(tokens)
        pair.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, head_dim, block_size", [(1, 8, 64), (2, 24, 17), (4, 80, 1), (2, 256, 16)])
def test_odd_sizes_hold_the_same_bits(heads, head_dim, block_size, dtype):
    pair = Pair("gemma3_text", shape=(heads, head_dim, head_dim), dtype=dtype, block_size=block_size)
    for tokens in (5, 1, 14):
        pair.update(tokens)
    pair.check()


def test_layers_may_differ_in_shape():
    pair = Pair("llama", block_size=4)
    for tokens in (6, 1):
        for index, shape in enumerate([(2, 4, 4), (1, 8, 8), (2, 4, 6)]):
            pair.shape, pair.attention = shape, [index]
            pair.update(tokens)
    pair.attention = [0, 1, 2]
    pair.check()


def test_strided_and_expanded_states_are_stored_by_value():
    cache, states = PagedCache(config_of("llama")), torch.randn(1, 9, 2, 4)
    key = states.transpose(1, 2).expand(3, -1, -1, -1)  # a transposed view, as models hand it over
    held_key, held_value = cache.update(key, key[..., ::2], 0)
    expected = key.clone()
    states.zero_()
    assert torch.equal(held_key + 0, expected) and torch.equal(held_value + 0, expected[..., ::2])


@pytest.mark.parametrize("first", list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_mixed_dtypes_are_widened_as_a_dynamic_cache_does_or_refused(first):
    """Under autocast, rotary embeddings make keys float32, and the values beside them stay bfloat16."""
    for second in itertools.product(FLOATS, FLOATS):
        paged, dynamic, held = PagedCache(config_of("llama")), DynamicCache(config=config_of("llama")), None
        for dtypes in (first, second):
            key, value = (states.to(dtype) for states, dtype in zip(random_kv(2, 5), dtypes, strict=True))
            try:
                given = paged.update(key, value, 0)
            except ValueError:  # only where the DynamicCache widens what it holds already
                widened = [
                    torch.promote_types(old.dtype, new) != old.dtype for old, new in zip(held, dtypes, strict=True)
                ]
                assert any(widened), (first, second)
                break
            held = dynamic.update(key, value, 0)
            for mine, other in zip(given, held, strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine + 0, other), (first, second)


def test_a_cache_written_in_inference_mode_goes_on_outside_it():
    pair = Pair("gemma3_text", block_size=4)
    with torch.inference_mode():
        pair.update(11)
    pair.update(2)
    with torch.inference_mode():
        pair.update(40)
    pair.update(1)
    pair.check()


@pytest.mark.parametrize("family, ahead", [("llama", 1), ("mistral", 2), ("gemma3_text", 0)])
def test_layers_may_be_fed_one_after_the_other(family, ahead):
    """A layer that lags behind writes into blocks that its group holds already, but not into a fork's."""
    pair = Pair(family, block_size=4)
    pair.attention = [ahead]
    pair.update(9)
    fork = pair.fork()
    pair.update(4)
    for index in {0, 1, 2} - {ahead}:
        pair.attention = fork.attention = [index]
        pair.update(9)
        pair.update(4)
        fork.update(9)
    for each in (pair, fork):
        each.attention = [0, 1, 2]
        each.update(2)
        each.check()


# Lazy tensors


@pytest.mark.parametrize(
    "move_on",
    [
        lambda cache: cache.update(*random_kv(2, 1), 0),
        lambda cache: cache.crop(-1),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reset(),
    ],
)
def test_keys_read_after_the_cache_has_moved_on_are_an_error(move_on):
    cache = PagedCache(config_of("llama"))
    key, value = random_kv(2, 5)
    held_key, held_value = cache.update(key, value, 0)
    assert torch.equal(held_key + 0, key)  # read in time: stays readable
    move_on(cache)
    assert torch.equal(held_key + 0, key)
    with pytest.raises(RuntimeError, match="layer 0 .*moved on"):
        held_value + 0


@pytest.mark.parametrize("look", ["stats", "check_integrity", "fork", "__repr__", "storages"])
def test_looking_at_a_cache_does_not_change_what_update_returned(look):
    pair = Pair("mistral", block_size=4)
    pair.update(9)
    for index in pair.attention:
        key, value = random_kv(2, 10)
        held, expected = pair.paged.update(key, value, index), pair.dynamic.update(key, value, index)
    getattr(pair.paged, look)()
    assert torch.equal(held[0] + 0, expected[0]) and torch.equal(held[1] + 0, expected[1])


# Gradients


def test_gradients_of_a_first_chunk_equal_those_of_a_dynamic_cache():
    gradients = []
    for kind in (PagedCache, DynamicCache):
        torch.manual_seed(0)
        key, value = (states.requires_grad_() for states in random_kv(2, 12))
        held_key, held_value = kind(config=config_of("gemma3_text")).update(key, value, 0)
        (held_key * torch.randn(2, 2, 12, 4) + held_key * held_value).sum().backward()
        gradients.append((key.grad, value.grad))
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradients_reach_the_new_tokens_and_values_stay_exact(family):
    pair = Pair(family, block_size=4)
    pair.update(13)
    key, value = random_kv(2, 5)
    key.requires_grad_()
    held, expected = pair.paged.update(key, value, 0), pair.dynamic.update(key, value, 0)
    assert torch.equal(held[0], expected[0]) and torch.equal(held[1], expected[1])
    (2 * held[0]).sum().backward()
    assert torch.equal(key.grad, torch.full_like(key, 2))
    assert torch.equal(pair.paged.layers[0].keys, pair.dynamic.layers[0].keys)
    with torch.no_grad():
        assert not pair.paged.update(key, value, 1)[0].requires_grad


# Random operations

_operations = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 5, 17])),
    st.tuples(st.just("reorder"), st.integers(0, 2**16)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("select"), st.integers(0, 2**16)),
    st.tuples(st.just("mask"), st.integers(0, 2**16)),
    st.tuples(st.just("crop"), st.sampled_from([0, 1, 2, 3, 9, 50])),
    st.tuples(st.just("record"), st.just(0)),
    st.tuples(st.just("fork"), st.just(0)),
    st.tuples(st.just("stats"), st.just(0)),
)


def _keeps_its_window(layer, removed: int) -> bool:
    """Whether the installed layer, cropped by so many tokens, holds all that the next query sees."""
    length, held = layer.get_seq_length(), layer.keys.shape[2]
    if not layer.is_sliding or length < WINDOW:
        return True
    return layer.record_past and held - removed >= min(length - removed, WINDOW - 1) >= 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(["llama", "llama", "mistral", "gemma3_text"]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    operations=st.lists(st.tuples(st.integers(0, 2), _operations), max_size=14),
)
def test_any_sequence_of_operations(family, block_size, operations):
    """After every operation on one of up to three forks, every fork holds what its own DynamicCache holds."""
    pairs = [Pair(family, block_size=block_size)]
    for which, (name, number) in operations:
        pair = pairs[which % len(pairs)]
        rows = torch.Generator().manual_seed(number)
        if name == "update":
            pair.update(number)
        elif name == "reorder":
            index = torch.randint(pair.batch, (pair.batch,), generator=rows)
            pair.take_rows("reorder_cache", index, index)
        elif name == "repeat" and pair.batch * number <= 6:
            index = torch.arange(pair.batch).repeat_interleave(number)
            pair.take_rows("batch_repeat_interleave", number, index)
        elif name == "select":
            index = torch.randint(-pair.batch, pair.batch, (1 + number % 4,), generator=rows)
            pair.take_rows("batch_select_indices", index, index)
        elif name == "mask":
            mask = torch.rand(pair.batch, generator=rows) < 0.7
            mask[number % pair.batch] = True
            pair.take_rows("batch_select_indices", mask, mask.nonzero().flatten())
        elif name == "record":
            pair.both("activate_past_recording")
        elif name == "crop" and pair.length and all(_keeps_its_window(layer, number) for layer in pair.dynamic.layers):
            pair.both("crop", -number)
            pair.trim(pair.length)
        elif name == "fork" and len(pairs) < 3:
            pairs.append(pair.fork())
        elif name == "stats":
            assert pair.paged.stats().blocks_held <= pair.paged.stats().blocks_used
        for each in pairs:
            each.check_held()
            each.paged.check_integrity()
