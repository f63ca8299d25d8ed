"""Rows of one prompt (beams, returned sequences) in a PagedCache that was told to expect them.

Contract: `expect(shared_rows=n)` stores each run of n rows once while their K/V are the same bit for bit. Rows that
differ, from the start or from a later layer or step on, keep their own values.
"""

from __future__ import annotations

import pytest
import torch
from cache_helpers import config_of, random_kv

from hf_paged import PagedCache

LAYERS = 3


def same_rows(runs: int, copies: int, tokens: int, dtype=torch.float32):
    """K/V of `runs` prompts, each `copies` times."""
    key, value = random_kv(runs, tokens, dtype=dtype)
    return key.repeat_interleave(copies, dim=0), value.repeat_interleave(copies, dim=0)


def feed(cache: PagedCache, states: list) -> None:
    """Give each layer its K/V and compare what update returns."""
    for index, (key, value) in enumerate(states):
        held = cache.update(key, value, index)
        tokens = key.shape[2]
        assert torch.equal((held[0] + 0)[:, :, -tokens:], key) and torch.equal((held[1] + 0)[:, :, -tokens:], value)
    cache.check_integrity()


def test_identical_rows_are_stored_once_until_they_part():
    cache, prompt, more = PagedCache(config_of("llama")), [], []
    cache.expect(shared_rows=4)
    for _ in range(LAYERS):
        prompt.append(same_rows(2, 4, 33))
        more.append(random_kv(8, 1))
    feed(cache, prompt)
    assert cache.stats().blocks_held == cache.stats().blocks_used == 2 * 3
    feed(cache, [same_rows(2, 4, 7) for _ in range(LAYERS)])  # a second chunk of the prompt
    assert cache.stats().blocks_held == 2 * 3
    feed(cache, more)
    assert cache.stats().blocks_held == 2 * (2 + 4)
    for index in range(LAYERS):
        keys = cache.layers[index].keys
        assert torch.equal(keys[:, :, :33], prompt[index][0]) and torch.equal(keys[:, :, 40:], more[index][0])


def test_a_prompt_in_chunks_needs_no_block_to_spare():
    """The copies of one prompt are no reason to copy the block that they all fill together."""
    cache = PagedCache(config_of("llama"), {"num_blocks": 2})
    cache.expect(shared_rows=4)
    for tokens in (5, 6, 1, 4, 16):
        feed(cache, [same_rows(1, 4, tokens) for _ in range(LAYERS)])
    with pytest.raises(RuntimeError, match="needs 1 blocks?, 0 available of 2"):
        feed(cache, [same_rows(1, 4, 1) for _ in range(LAYERS)])
    assert cache.stats().blocks_held == 2 and cache.get_seq_length() == 32
    cache.check_integrity()


@pytest.mark.parametrize("different_from", range(LAYERS))
@pytest.mark.parametrize("past", [0, 5])
def test_rows_that_differ_from_some_layer_on_are_stored_apart(different_from, past):
    """The layers before have written the shared blocks already; every row must keep its own K/V all the same."""
    cache = PagedCache(config_of("llama"), {"block_size": 4})
    cache.expect(shared_rows=3)
    if past:
        feed(cache, [same_rows(2, 3, past) for _ in range(LAYERS)])
    states = [same_rows(2, 3, 6) if i < different_from else random_kv(6, 6) for i in range(LAYERS)]
    feed(cache, states)
    feed(cache, [random_kv(6, 3) for _ in range(LAYERS)])
    for index, (key, value) in enumerate(states):
        layer = cache.layers[index]
        assert torch.equal(layer.keys[:, :, past : past + 6], key)
        assert torch.equal(layer.values[:, :, past : past + 6], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_differ_by_more_than_rounding_keep_their_own_values(dtype):
    """A large value elsewhere, as models have in single channels or tokens, is no licence to mix rows up."""
    cache, step = PagedCache(config_of("llama")), [same_rows(1, 2, 5, dtype) for _ in range(LAYERS)]
    cache.expect(shared_rows=2)
    for key, value in step:
        key[:, :, 0], value[:, 1, :, 3] = 1000, 1000
        for states, token in ((key, 2), (value, 4)):
            states[1, 0, token, 1] += 64 * torch.finfo(dtype).eps * states[0, 0, token].abs().max()
    feed(cache, step)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_shared_rows_of_layers_that_are_fed_one_after_the_other(family):
    cache = PagedCache(config_of(family), {"block_size": 4})
    cache.expect(shared_rows=2)
    chunks = [[same_rows(2, 2, 5), same_rows(2, 2, 3)] for _ in range(LAYERS)]
    for index in range(LAYERS):
        for key, value in chunks[index]:
            held, _ = cache.update(key, value, index)
            assert torch.equal((held + 0)[:, :, -key.shape[2] :], key)
    for index in range(LAYERS):
        expected = torch.cat([key for key, _ in chunks[index]], dim=2)
        assert torch.equal(cache.layers[index].keys, expected[:, :, -cache.layers[index].keys.shape[2] :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_differ_by_one_rounding_are_stored_apart(dtype):
    """No tolerance: where a bias dominates, the K/V of different tokens are as close as roundings."""
    cache = PagedCache(config_of("llama"))
    cache.expect(shared_rows=2)
    for index in range(LAYERS):
        key, value = same_rows(1, 2, 20, dtype)
        key[1, 0, 3, :] = torch.nextafter(key[0, 0, 3, :], torch.tensor(9.0, dtype=dtype))
        held = cache.update(key, value, index)
        assert torch.equal((held[0] + 0), key) and torch.equal((held[1] + 0), value)
    assert cache.stats().blocks_held == 4


def test_nan_in_one_row_stays_there():
    cache, step = PagedCache(config_of("llama")), [same_rows(1, 3, 5) for _ in range(LAYERS)]
    cache.expect(shared_rows=3)
    step[1][0][1] = float("nan")
    for index, (key, value) in enumerate(step):
        held, _ = cache.update(key, value, index)
        assert torch.equal((held + 0).nan_to_num(7), key.nan_to_num(7))


@pytest.mark.parametrize("num_rows, copies", [(4, 3), (4, 8)])
def test_a_batch_that_is_not_in_runs_of_that_length_is_stored_as_it_is(num_rows, copies):
    cache = PagedCache(config_of("llama"))
    cache.expect(shared_rows=copies)
    feed(cache, [random_kv(num_rows, 3) for _ in range(LAYERS)])
    assert cache.stats().blocks_held == num_rows


def test_shared_rows_whose_padding_differs_are_not_shared():
    cache = PagedCache(config_of("llama"))
    cache.expect(torch.tensor([[0, 1, 1], [1, 1, 1]]), shared_rows=2)
    for index, (key, value) in enumerate([same_rows(1, 2, 3), random_kv(2, 3), random_kv(2, 3)]):
        held, _ = cache.update(key, value, index)
        assert torch.equal((held + 0)[1], key[1]) and torch.equal((held + 0)[0, :, 1:], key[0, :, 1:])
    cache.check_integrity()


def test_rows_that_are_reordered_or_forked_go_on_by_themselves():
    cache, prompt = PagedCache(config_of("llama"), {"block_size": 4}), [same_rows(1, 4, 6) for _ in range(LAYERS)]
    cache.expect(shared_rows=4)
    feed(cache, prompt)
    fork = cache.fork()
    cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
    assert cache.stats().blocks_used == 2
    for each in (cache, fork):
        feed(each, [random_kv(4, 1) for _ in range(LAYERS)])
    for each in (cache, fork):
        assert all(torch.equal(each.layers[i].keys[:, :, :6], prompt[i][0]) for i in range(LAYERS))


def test_expect_comes_before_the_first_token():
    cache = PagedCache(config_of("llama"))
    cache.update(*random_kv(2, 3), 0)
    with pytest.raises(ValueError, match="before the first token.*holds 3"):
        cache.expect(shared_rows=2)
    cache.crop(-3)
    cache.expect(shared_rows=2)
    feed(cache, [same_rows(3, 2, 4) for _ in range(LAYERS)])  # another batch, stored once
    assert cache.stats().blocks_held == 3
