"""How the formats of keys and values are spelled, kept and refused, and what a token takes in each."""

import dataclasses
import json
import pathlib
import pickle

import pytest
import torch
from cache_helpers import config_of
from tiny_models import shared
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedCache, PagedCacheConfig
from hf_paged.kv_format import KVFormat
from hf_paged.kv_pool import KVPool, MemoryBudget, PoolKey

E4M3, E5M2, INT8, DYNAMIC = "fp8_e4m3", "fp8_e5m2", "int8", "per_token_head"


def format_of(layer: int = 0, **settings) -> KVFormat:
    return PagedCacheConfig(**settings).formats.format_of(layer)


@pytest.mark.parametrize(
    "spelling, key, value",
    [
        ("auto", "auto", "auto"),
        (E4M3, E4M3, E4M3),
        (E5M2, E5M2, E5M2),
        (INT8, INT8, INT8),
        ("k:int8,v:fp8_e4m3", INT8, E4M3),
        (" v: fp8_e4m3 , k: int8 ", INT8, E4M3),
        ({"k": INT8, "v": E4M3}, INT8, E4M3),
        ({"v": E5M2}, "auto", E5M2),
        ("k:int8", INT8, "auto"),
        ("k:auto,v:auto", "auto", "auto"),
    ],
)
def test_spellings_of_the_dtype(spelling, key, value):
    kept = format_of(kv_cache_dtype=spelling)
    assert (kept.key_dtype, kept.value_dtype) == (key, value)
    # A side in the model's dtype has no scales at all.
    assert kept.key_granularity == (None if key == "auto" else DYNAMIC)
    assert kept.value_granularity == (None if value == "auto" else DYNAMIC)
    assert kept.is_quantized == (key != "auto" or value != "auto") and not kept.is_static


@pytest.mark.parametrize(
    "spelling, key, value",
    [
        (DYNAMIC, DYNAMIC, DYNAMIC),
        ("per_head", "per_head", "per_head"),
        ("per_tensor", "per_tensor", "per_tensor"),
        ("k:per_channel", "per_channel", DYNAMIC),
        ("k:per_channel,v:per_head", "per_channel", "per_head"),
        ({"v": "per_tensor"}, DYNAMIC, "per_tensor"),
    ],
)
def test_spellings_of_the_granularity(spelling, key, value):
    path = None if (key, value) == (DYNAMIC, DYNAMIC) else "scales.safetensors"
    kept = format_of(kv_cache_dtype=INT8, kv_scale_granularity=spelling, kv_scales=path)
    assert (kept.key_granularity, kept.value_granularity) == (key, value)
    assert kept.is_static == (path is not None)


def test_what_means_the_same_is_equal_hashes_alike_and_survives_json():
    one = PagedCacheConfig(kv_cache_dtype={"v": E4M3, "k": INT8}, skip_layers={2: "auto", 0: {"k": INT8, "v": INT8}})
    other = PagedCacheConfig(kv_cache_dtype="k:int8,v:fp8_e4m3", skip_layers=[(0, INT8), 2, 2])
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert (one.kv_cache_dtype, one.skip_layers) == ("k:int8,v:fp8_e4m3", ((0, INT8), 2))
    scales = PagedCacheConfig(kv_cache_dtype=INT8, kv_scale_granularity="k:per_head", kv_scales=pathlib.Path("a") / "b")
    assert scales.kv_scales == str(pathlib.Path("a") / "b")
    off = PagedCacheConfig(kv_cache_dtype=INT8, rotate_keys=False)
    for config in (one, scales, off, PagedCacheConfig(), PagedCacheConfig(kv_cache_dtype=INT8, skip_layers=range(3))):
        assert PagedCacheConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config
        assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config)
    # A dict that was JSON has strings for keys.
    assert PagedCacheConfig(skip_layers={"1": E5M2}) == PagedCacheConfig(skip_layers={1: E5M2})


def test_which_keys_are_rotated():
    assert format_of(kv_cache_dtype=INT8).rotates_keys
    assert not format_of(kv_cache_dtype="v:int8").rotates_keys and not format_of().rotates_keys
    assert not format_of(kv_cache_dtype=INT8, kv_scale_granularity="k:per_head", kv_scales="file").rotates_keys
    assert format_of(kv_cache_dtype=INT8, kv_scale_granularity="v:per_head", kv_scales="file").rotates_keys
    assert not format_of(kv_cache_dtype=INT8, rotate_keys=False).rotates_keys
    layers = {"skip_layers": {0: INT8, 1: "v:int8"}}
    assert [format_of(layer, **layers).rotates_keys for layer in range(3)] == [True, False, False]
    # True says what is so anyway; False stays for the format that is chosen next.
    assert PagedCacheConfig(kv_cache_dtype=INT8, rotate_keys=True) == PagedCacheConfig(kv_cache_dtype=INT8)
    assert PagedCacheConfig(rotate_keys=False).formats == PagedCacheConfig().formats
    for off in (
        PagedCacheConfig(kv_cache_dtype=INT8, rotate_keys=False),
        dataclasses.replace(PagedCacheConfig(rotate_keys=False), kv_cache_dtype=INT8),
    ):
        assert off != PagedCacheConfig(kv_cache_dtype=INT8) and not off.formats.format_of(0).rotates_keys
    assert dataclasses.replace(PagedCacheConfig(), kv_cache_dtype=INT8).formats.format_of(0).rotates_keys


def test_a_generation_config_saves_it(tmp_path):
    cache_config = PagedCacheConfig(kv_cache_dtype="k:int8,v:fp8_e4m3", skip_layers={1: E5M2})
    GenerationConfig(cache_implementation="paged", cache_config=cache_config).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert PagedCacheConfig.from_any(loaded.cache_config) == cache_config


def test_layers_that_differ():
    kept = {"kv_cache_dtype": E4M3, "skip_layers": {1: "auto", 2: INT8, 4: "k:int8,v:auto"}}
    assert [format_of(layer, **kept)[:2] for layer in range(5)] == [
        (E4M3, E4M3),
        ("auto", "auto"),
        (INT8, INT8),
        (E4M3, E4M3),
        (INT8, "auto"),
    ]
    assert not format_of(1, kv_cache_dtype=E4M3, skip_layers=(1,)).is_quantized
    # Only one layer in 8 bits.
    assert [format_of(layer, skip_layers={1: INT8}).is_quantized for layer in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': 'fp8' is not one of 'auto', 'fp8_e4m3', 'fp8_e5m2', 'int8'"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be a string or a dict of 'k' and 'v', got None"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype must be a string.*float8_e4m3fn"),
        ({"kv_cache_dtype": "q:int8"}, r"kv_cache_dtype='q:int8'.*\['q'\]"),
        ({"kv_cache_dtype": "k:int8,k:int8"}, "names a side twice"),
        ({"kv_cache_dtype": "k:int8,fp8_e4m3"}, r"\['fp8_e4m3'\]"),
        ({"kv_cache_dtype": {}}, "neither"),
        ({"kv_cache_dtype": {"k": 8}}, "8 is not one of 'auto'"),
        ({"kv_cache_dtype": INT8, "kv_scale_granularity": "per_block"}, "'per_block' is not one of 'per_token_head'"),
        ({"kv_cache_dtype": INT8, "kv_scale_granularity": "per_channel"}, "for keys alone"),
        ({"kv_cache_dtype": INT8, "kv_scale_granularity": "k:per_channel,v:per_channel"}, "for keys alone"),
        ({"skip_layers": -1}, "skip_layers must be.*got -1"),
        ({"skip_layers": "1"}, "skip_layers must be.*got '1'"),
        ({"skip_layers": [-1]}, "skip_layers: each layer must be an integer >= 0, got -1"),
        ({"skip_layers": [True]}, "integer >= 0, got True"),
        ({"skip_layers": [1.0]}, "integer >= 0, got 1.0"),
        ({"skip_layers": [(1, INT8, E4M3)]}, r"expected a number or \(layer, kv_cache_dtype\)"),
        ({"skip_layers": {1: "int4"}}, r"skip_layers\[1\]='int4'.*'fp8_e5m2'"),
        ({"skip_layers": [(1, INT8), 1]}, "layer 1 two dtypes, 'int8' and 'auto'"),
        ({"kv_cache_dtype": INT8, "kv_scale_granularity": "per_head", "kv_scales": 3}, "kv_scales must be the path"),
        ({"kv_cache_dtype": INT8, "kv_scales": "file"}, "kv_scales='file' are of no use.*'int8'.*per_token_head"),
        ({"kv_scales": "file"}, "kv_scales='file' are of no use with kv_cache_dtype='auto'"),
        ({"kv_scale_granularity": "per_head"}, "keys the granularity 'per_head', but kv_cache_dtype='auto'"),
        ({"kv_cache_dtype": "k:int8", "kv_scale_granularity": "v:per_head"}, "values the granularity 'per_head'"),
        ({"kv_cache_dtype": INT8, "rotate_keys": 1}, "rotate_keys must be True, False or None, got 1"),
        ({"rotate_keys": True}, "rotate_keys=True.*kv_cache_dtype='auto'.*no layer keeps keys in 8 bits"),
        ({"kv_cache_dtype": "v:int8", "rotate_keys": True}, "rotate_keys=True.*'v:int8'"),
        (
            {"kv_cache_dtype": INT8, "kv_scale_granularity": "per_head", "kv_scales": "f", "rotate_keys": True},
            "rotate_keys=True.*'per_head'",
        ),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PagedCacheConfig(**settings)


@pytest.mark.parametrize("granularity", ["per_head", "per_tensor", "k:per_channel", "v:per_head"])
def test_fixed_scales_are_never_made_up(granularity):
    with pytest.raises(ValueError, match=r"kv_scales is None; run hf_paged.calibrate_kv_scales\(model, dataset\)"):
        PagedCacheConfig(kv_cache_dtype=E4M3, kv_scale_granularity=granularity)


def test_layers_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"skip_layers names layer 3; the layers that keep.*\[0, 1, 2\]"):
        PagedCache(config_of("llama"), {"kv_cache_dtype": INT8, "skip_layers": [0, 3]})
    # Layers of linear attention keep none.
    with pytest.raises(ValueError, match=r"names layer 0; .*\[3\]"):
        PagedCache(config_of("qwen3_next"), {"kv_cache_dtype": INT8, "skip_layers": [0]})
    with pytest.raises(ValueError, match=r"names layer 9; .*\[0, 1, 2\]"):
        hf_paged.ContinuousBatcher(shared("llama_gqa"), cache_config={"kv_cache_dtype": INT8, "skip_layers": [9]})


BF16 = torch.bfloat16
CPU = torch.device("cpu")


def pool(head_dim: int, num_blocks: int = 3, block_size: int = 16, **settings) -> KVPool:
    """A pool of one bfloat16 layer of 2 heads."""
    config = PagedCacheConfig(num_blocks=num_blocks, block_size=block_size, **settings)
    key = PoolKey(2, head_dim, head_dim, BF16, CPU, 0, config.formats.format_of(0))
    made = KVPool(key, config, MemoryBudget(None))
    made.add_layer(0)
    return made


@pytest.mark.parametrize("name", [E4M3, E5M2, INT8, "k:int8,v:fp8_e4m3"])
@pytest.mark.parametrize("head_dim, share, requests", [(64, 0.54, 1.85), (128, 0.52, 1.92)])
def test_bytes_of_8_bit_blocks_scales_included(name, head_dim, share, requests):
    wide, narrow = pool(head_dim), pool(head_dim, kv_cache_dtype=name)
    for made in (wide, narrow):
        held = sum(tensor.untyped_storage().nbytes() for tensor in made.storages())
        assert held == 3 * made.block_bytes
    assert narrow.block_bytes == 2 * 16 * 2 * (head_dim + 4)
    assert narrow.block_bytes <= share * wide.block_bytes
    # Whole blocks that fit in the memory of 1000.
    assert 1000 * wide.block_bytes // narrow.block_bytes >= 1000 * requests


def test_bytes_where_one_side_is_kept_and_head_sizes_differ():
    kept = format_of(kv_cache_dtype="k:int8")
    assert kept.token_bytes(4, 24, 12, 2) == 4 * (24 + 4 + 12 * 2)
    fixed = format_of(kv_cache_dtype=INT8, kv_scale_granularity="k:per_channel", kv_scales="file")
    assert fixed.token_bytes(4, 24, 12, 4) == 4 * (24 + 12 + 4)  # fixed scales are not stored with each token
    assert KVFormat().token_bytes(4, 24, 12, 2) == 4 * 36 * 2


def test_pools_are_apart_where_formats_are():
    cache = PagedCache(config_of("llama"), {"kv_cache_dtype": E4M3, "skip_layers": {1: "auto"}})
    states = torch.randn(1, 2, 3, 8)
    for layer in range(3):
        cache.update(states, states, layer)
    pools = {key.format: made for key, made in cache._pools.pools.items()}
    assert {kept.key_dtype: made.layers for kept, made in pools.items()} == {E4M3: [0, 2], "auto": [1]}
    assert cache.stats().num_layers == 3
    dtypes = [made.pages(made.layers[0]).key_cache.dtype for made in pools.values()]
    assert dtypes == [torch.float8_e4m3fn, torch.float32]


def test_dtypes_without_8_bits_are_refused_by_name():
    cache = PagedCache(config_of("llama"), {"kv_cache_dtype": "k:int8,v:fp8_e4m3"})
    states = torch.ones(1, 2, 3, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="'int8' for keys and 'fp8_e4m3' for values.*torch.int32"):
        cache.update(states, states, 0)
