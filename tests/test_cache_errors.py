"""What a PagedCache refuses, and that it stays as it was.

Contract: wrong settings and keys or values that do not fit are a ValueError that names them; what does not exist is
a NotImplementedError. A refused update leaves lengths, blocks and forks alone.
"""

from __future__ import annotations

import pytest
import torch
from cache_helpers import Pair, config_of, random_kv

from hf_paged import PagedCache, PagedCacheConfig


@pytest.mark.parametrize("config", [None, {}, "llama", torch.nn.Linear(1, 1)])
def test_config_of_a_wrong_type(config):
    with pytest.raises(ValueError, match=f"config must be a model's config.*{type(config).__name__}"):
        PagedCache(config)


@pytest.mark.parametrize(
    "cache_config, message",
    [
        ({"blocksize": 16}, "blocksize.*block_size"),
        ([16], "list"),
        ({"block_size": None}, "block_size"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype"),
        *(({name: value}, name) for name in ("block_size", "num_blocks") for value in (0, -1, True, 1.5, "16")),
        *(({"memory_fraction": value}, "memory_fraction") for value in (0, -0.1, 1.01, True, "0.5", float("nan"))),
    ],
)
def test_bad_settings_are_named(cache_config, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(config_of("llama"), cache_config)


def test_settings_that_are_good():
    assert PagedCache(config_of("llama"), PagedCacheConfig(block_size=3)).cache_config.block_size == 3
    assert PagedCache(config_of("llama"), {"memory_fraction": 1}).cache_config.block_size == 16


_KEY, _VALUE = random_kv(2, 2)
_MISFITS = {
    "another batch": random_kv(3, 1),
    "another number of heads": random_kv(2, 1, (1, 4, 4)),
    "another head size of the keys": random_kv(2, 1, (2, 5, 4)),
    "another head size of the values": random_kv(2, 1, (2, 4, 5)),
    "keys longer than values": (_KEY, _VALUE[:, :, :1]),
    "values longer than keys": (_KEY[:, :, :1], _VALUE),
    "a wider dtype": random_kv(2, 40, dtype=torch.float64),
    "a wider dtype of the values": (_KEY, _VALUE.double()),
    "no batch": (_KEY[0], _VALUE[0]),
}


@pytest.mark.parametrize("misfit", _MISFITS)
def test_states_that_do_not_fit_are_refused_and_change_nothing(misfit):
    pair = Pair("llama", block_size=4)
    pair.update(3)
    blocks = pair.paged.stats().blocks_held
    for index in range(3):
        with pytest.raises(ValueError):
            pair.paged.update(*_MISFITS[misfit], index)
    assert pair.paged.stats().blocks_held == blocks
    fork = pair.fork()
    for each in (pair, fork):
        each.update(1)
    pair.check()
    fork.check()


def test_one_layer_alone_cannot_be_changed():
    pair = Pair("llama")
    pair.update(3)
    layer, index = pair.paged.layers[0], torch.tensor([0])
    for name, args in [("crop", (-1,)), ("reset", ()), ("reorder_cache", (index,)), ("batch_repeat_interleave", (2,))]:
        with pytest.raises(NotImplementedError, match="on the cache"):
            getattr(layer, name)(*args)
    with pytest.raises(NotImplementedError, match="offload"):
        layer.offload()
    with pytest.raises(AttributeError, match="update"):
        layer.keys = torch.zeros(1)
    pair.check()
