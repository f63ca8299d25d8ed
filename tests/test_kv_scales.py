"""KVScales: what is written is read back, scales of another model are refused, checkpoints' own scales are found."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from hf_paged import KVScales
from hf_paged.kv_scales import for_cache
from hf_paged.model_identity import ModelIdentity

LAYERS, HEADS, DIM = 3, 2, 16  # of llama_gqa


def scales(granularity="per_head", dtype="fp8_e4m3", layers=LAYERS, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    shape = {"per_tensor": (), "per_head": (HEADS,), "per_channel": (HEADS, DIM)}[granularity]
    value_kind = "per_head" if granularity == "per_channel" else granularity
    value_shape = (HEADS,) if value_kind == "per_head" else ()
    arguments = {
        "key": {i: torch.rand(shape, generator=generator) + 0.1 for i in range(layers)},
        "value": {i: torch.rand(value_shape, generator=generator) + 0.1 for i in range(layers)},
        "key_dtype": dtype,
        "value_dtype": dtype,
        "key_granularity": granularity,
        "value_granularity": value_kind,
    }
    return KVScales(**{**arguments, **changes})


def settings(path, dtype="fp8_e4m3", granularity="per_head", **more):
    return {"kv_cache_dtype": dtype, "kv_scale_granularity": granularity, "kv_scales": str(path), **more}


# The file


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "per_channel"])
def test_a_file_gives_back_what_was_saved(tmp_path, granularity):
    model = tiny.shared("llama_gqa")
    made = scales(granularity, "int8", identity=ModelIdentity.of(model), calibration={"tokens": 7})
    made.save(tmp_path / "s.safetensors")
    read = KVScales.load(tmp_path / "s.safetensors")
    for i in range(LAYERS):
        for mine, theirs in zip(made.layer(i), read.layer(i), strict=True):
            assert mine.shape == theirs.shape and torch.equal(mine, theirs)
    assert read.digest() == made.digest() and len(read.digest()) == 16
    assert (read.key_dtype, read.value_granularity, read.calibration) == ("int8", made.value_granularity, {"tokens": 7})
    read.check(model)
    assert [file.name for file in tmp_path.iterdir()] == ["s.safetensors"]


def test_digest_sees_scales_formats_and_granularity():
    base = scales()
    others = [scales(seed=1), scales(dtype="int8"), scales(layers=2), scales(value={}, value_dtype=None)]
    assert len({made.digest() for made in (base, *others)}) == 5
    assert base.digest() == scales().digest()


def test_one_side_alone(tmp_path):
    scales(value={}, value_dtype=None, value_granularity=None).save(tmp_path / "k")
    read = KVScales.load(tmp_path / "k")
    key, value = read.layer(0)
    assert key.shape == (HEADS,) and value is None and read.value_dtype is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": {}, "value": {}}, "neither"),
        ({"key": {0: torch.tensor([1.0, 0.0])}}, "positive and finite"),
        ({"key": {0: torch.tensor([1.0, float("nan")])}}, "positive and finite"),
        ({"key": {0: torch.ones(2, 2)}}, "2 dimensions"),
        ({"key": {0: torch.ones(2).double()}}, "float32"),
        ({"value_granularity": "per_channel"}, "per_channel"),
        ({"key_granularity": "per_token_head"}, "per_token_head"),
        ({"key_dtype": "auto"}, "auto"),
    ],
)
def test_wrong_scales_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        scales(**changes)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="does not exist.*calibrate_kv_scales"):
        KVScales.load(tmp_path / "nothing")
    (tmp_path / "text.safetensors").write_text("no tensors in here, and long enough for a header")
    with pytest.raises(ValueError, match="no safetensors file"):
        KVScales.load(tmp_path / "text.safetensors")
    save_file({"model.layers.0.mlp.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no k_scale"):
        KVScales.load(tmp_path / "other.safetensors")
    scales().save(tmp_path / "s")
    save_file(
        load_file(tmp_path / "s"), tmp_path / "s", metadata={"format": "hf_paged.kv_scales", "format_version": "9"}
    )
    with pytest.raises(ValueError, match="version 9"):
        KVScales.load(tmp_path / "s")


# Which model


def calibrated(model):
    return scales(identity=ModelIdentity.of(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_model_in_another_dtype_and_place(tmp_path, dtype):
    model = tiny.build("llama_gqa")
    model.save_pretrained(tmp_path / "a")
    again = type(model).from_pretrained(tmp_path / "a", dtype=dtype, attn_implementation="sdpa")
    calibrated(model).check(again)
    calibrated(again).check(model)
    again.resize_token_embeddings(tiny.VOCAB + 9)
    calibrated(model).check(again)
    calibrated(model).check(config=again.config)


def test_training_mode_and_gradients_do_not_matter():
    model = tiny.build("gpt2")
    made = calibrated(model)
    model.train()
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    made.check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_is_refused(dtype):
    made = calibrated(tiny.build("llama_gqa"))
    with pytest.raises(ValueError, match="another model.*weights"):
        made.check(tiny.build("llama_gqa", seed=1, dtype=dtype))
    with pytest.raises(ValueError, match="num_key_value_heads is 1, not 2"):
        made.check(tiny.build("llama_mqa", dtype=dtype))
    with pytest.raises(ValueError, match="model_type is qwen2, not llama"):
        made.check(config=tiny.config("qwen2"))
    with pytest.raises(ValueError, match="rope_theta"):
        made.check(config=tiny.config("llama_gqa", rope_parameters={"rope_type": "default", "rope_theta": 7e5}))
    with pytest.raises(ValueError, match="num_hidden_layers"):
        made.check(config=tiny.config("llama_gqa", num_hidden_layers=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["q_proj", "v_proj", "down_proj"])
def test_a_fine_tuned_model_is_refused(name, dtype):
    """One matrix of one layer, moved by one percent of its size along a direction of rank 2, as a merged LoRA does."""
    base = tiny.build("llama_gqa")
    tuned = tiny.build("llama_gqa")
    weight = dict(tuned.named_parameters())[
        f"model.layers.1.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}.weight"
    ]
    generator = torch.Generator().manual_seed(3)
    change = torch.randn(weight.shape[0], 2, generator=generator) @ torch.randn(2, weight.shape[1], generator=generator)
    with torch.no_grad():
        weight.add_(change * (0.01 * weight.norm() / change.norm()))
    with pytest.raises(ValueError, match=rf"{name}.*differs by"):
        calibrated(base).check(tuned.to(dtype))


def test_an_active_adapter_is_another_model():
    peft = pytest.importorskip("peft")
    base = tiny.build("llama_gqa")
    made = calibrated(base)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
    with pytest.raises(ValueError, match="adapter"):
        made.check(adapted)


def test_nothing_to_compare_is_no_refusal():
    scales().check(tiny.shared("llama_gqa"))
    calibrated(tiny.shared("llama_gqa")).check()


# What a cache takes


def test_no_scales_where_none_are_wanted():
    assert for_cache(None) is None
    assert for_cache({"kv_cache_dtype": "fp8_e4m3"}) is None


def test_for_cache_checks_model_and_format(tmp_path):
    model, path = tiny.shared("llama_gqa"), tmp_path / "s"
    calibrated(model).save(path)
    assert for_cache(settings(path), model=model).digest() == scales().digest()
    assert for_cache(settings(path), model_config=model.config) is not None
    with pytest.raises(ValueError, match="another model"):
        for_cache(settings(path), model=tiny.shared("qwen2"))
    with pytest.raises(ValueError, match="per_head scales of keys for fp8_e4m3, layer 0 needs per_head for int8"):
        for_cache(settings(path, dtype="int8"), model=model)
    with pytest.raises(ValueError, match="needs per_tensor"):
        for_cache(settings(path, granularity="per_tensor"), model_config=model.config)


def test_for_cache_wants_every_layer(tmp_path):
    model, path = tiny.shared("llama_gqa"), tmp_path / "s"
    scales(layers=2).save(path)
    with pytest.raises(ValueError, match="layer 2.*skip_layers"):
        for_cache(settings(path), model=model)
    assert for_cache(settings(path, skip_layers=[2]), model=model) is not None
    scales(value={}, value_dtype=None, value_granularity=None).save(path)
    with pytest.raises(ValueError, match="no scales of values"):
        for_cache(settings(path), model=model)
    assert for_cache(settings(path, granularity="k:per_head,v:per_token_head"), model=model) is not None


def test_a_file_that_changes_is_read_again(tmp_path):
    path = tmp_path / "s"
    scales().save(path)
    assert for_cache(settings(path)).digest() == scales().digest()
    scales(seed=5).save(path)
    assert for_cache(settings(path)).digest() == scales(seed=5).digest()


# Scales of a checkpoint

NAMES = {
    "compressed-tensors": ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"),
    "vLLM": ("model.layers.{}.self_attn.attn.k_scale", "model.layers.{}.self_attn.attn.v_scale"),
    "ModelOpt": ("model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"),
    "Quark": ("model.layers.{}.self_attn.k_proj.output_scale", "model.layers.{}.self_attn.v_proj.output_scale"),
    "one for both": ("model.layers.{}.self_attn.kv_scale",) * 2,
    "composite": (
        "model.language_model.layers.{}.self_attn.k_scale",
        "model.language_model.layers.{}.self_attn.v_scale",
    ),
    "gpt2": ("transformer.h.{}.attn.k_scale", "transformer.h.{}.attn.v_scale"),
}
NOISE = {
    "model.layers.0.self_attn.q_scale": torch.ones(1),
    "model.layers.0.self_attn.q_proj.output_scale": torch.ones(1) * 9,
    "model.layers.0.self_attn.k_proj.weight_scale": torch.ones(1) * 8,
    "model.layers.0.self_attn.k_proj.input_scale": torch.ones(1) * 7,
    "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
}


def checkpoint(folder, names=NAMES["compressed-tensors"], layers=range(LAYERS), shape=(1,), config=None, **more):
    """A folder with scales 0.5, 1.5, 2.5 ... of keys, and the same (or a quarter) of values."""
    tensors = dict(NOISE)
    for i in layers:
        tensors[names[0].format(i)] = torch.full(shape, i + 0.5, dtype=torch.bfloat16)
        if names[1] != names[0]:
            tensors[names[1].format(i)] = torch.full(shape, (i + 0.5) / 4, dtype=torch.bfloat16)
    tensors |= more
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", NAMES)
def test_names_that_tools_give(tmp_path, kind):
    read = KVScales.load(checkpoint(tmp_path, NAMES[kind]))
    part = 1 if kind == "one for both" else 4
    for i in range(LAYERS):
        key, value = read.layer(i)
        assert key.shape == value.shape == () and (float(key), float(value)) == (i + 0.5, (i + 0.5) / part)
    assert (read.key_dtype, read.key_granularity) == ("fp8_e4m3", "per_tensor")
    assert KVScales.load(tmp_path / "model.safetensors").digest() == read.digest()


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1), (1, HEADS, 1, 1)])
def test_scales_for_each_head(tmp_path, shape):
    read = KVScales.load(checkpoint(tmp_path, shape=shape))
    assert read.key_granularity == "per_head" and read.layer(1)[0].tolist() == [1.5] * HEADS


def test_shards_and_index(tmp_path):
    key, value = NAMES["vLLM"]
    tensors = [(name.format(i), torch.ones(()) + i) for i in range(LAYERS) for name in (key, value)]
    shards = {"a.safetensors": dict(tensors[:3]), "b.safetensors": dict(tensors[3:])}
    for file, content in shards.items():
        save_file(content, tmp_path / file)
    weight_map = {name: file for file, content in shards.items() for name in content}
    weight_map["model.embed_tokens.weight"] = "not-here.safetensors"  # a shard without scales is not opened
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in (tmp_path, index):
        assert [float(KVScales.load(path).layer(i)[1]) for i in range(LAYERS)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [({"num_bits": 8, "type": "float"}, "fp8_e4m3"), ({"num_bits": 8, "type": "int"}, "int8"), (None, "fp8_e4m3")],
)
def test_format_of_the_scheme(tmp_path, scheme, dtype):
    folder = checkpoint(tmp_path, config={"quantization_config": {"kv_cache_scheme": scheme}})
    assert KVScales.load(folder).key_dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"config": {"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}}, "4-bit"),
        ({"model.layers.0.self_attn.k_zero_point": torch.ones(1)}, "asymmetric"),
        ({"model.layers.0.self_attn.attn.k_scale": torch.ones(1) * 9}, "contradicts"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(HEADS)}, "one a head in others"),
        ({"model.layers.1.self_attn.v_scale": -torch.ones(1)}, "positive and finite"),
    ],
)
def test_checkpoints_that_cannot_be_used(tmp_path, arguments, said):
    with pytest.raises(ValueError, match=said):
        KVScales.load(checkpoint(tmp_path, **arguments))


def test_checkpoint_of_another_model_or_without_a_layer(tmp_path):
    model = tiny.shared("llama_gqa")
    folder = checkpoint(tmp_path / "a", config=model.config.to_dict())
    wanted = settings(folder, granularity="per_tensor")
    assert for_cache(wanted, model=model) is not None
    with pytest.raises(ValueError, match="another model"):
        for_cache(wanted, model=tiny.shared("qwen2"))
    folder = checkpoint(tmp_path / "b", layers=[0, 2], config=model.config.to_dict())
    with pytest.raises(ValueError, match="layer 1"):
        for_cache(settings(folder, granularity="per_tensor"), model=model)
