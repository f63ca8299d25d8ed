"""memory_report and `hf-paged memory`: figures equal what real caches hold, and need nothing but a config."""

import json

import pytest
import tiny_models as tiny
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, StaticCache
from typer.testing import CliRunner

import hf_paged
from hf_paged import memory_report
from hf_paged.cli import app
from hf_paged.kv_shapes import _named, kv_shapes
from hf_paged.memory import format_size, parse_size

GIB = 2**30
LLAMA2_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
runner = CliRunner()


def test_llama_2_7b_takes_a_gibibyte():
    padded, paged, quantized = memory_report(LlamaConfig(**LLAMA2_7B), seq_len=2048, dtype="float16").plans
    assert padded.bytes_per_request == paged.bytes_per_request == GIB
    assert padded.bytes_per_token == 2 * 32 * 32 * 128 * 2
    assert paged.blocks_per_request == 128 and padded.blocks_per_request is None
    assert quantized.bytes_per_request == 2 * 32 * 32 * (128 + 4) * 2048


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0.54), (128, 0.52)])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_eight_bits_are_half(head_dim, most, dtype):
    config = LlamaConfig(num_hidden_layers=4, head_dim=head_dim)
    report = memory_report(config, seq_len=512, kv_cache_dtype=dtype, dtype="bfloat16", memory="1GiB")
    _, paged, quantized = report.plans
    assert quantized.bytes_per_request <= most * paged.bytes_per_request
    assert quantized.requests >= 1.85 * paged.requests > 0


def cached(model, length, **cache_config):
    """A PagedCache after a prompt of two tokens less and two tokens one by one."""
    cache = hf_paged.PagedCache(model.config, cache_config)
    ids = torch.tensor(tiny.prompts((length,)))
    with torch.no_grad():
        for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
            model(part, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "k:int8"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_figures_are_those_of_a_cache(name, kv_cache_dtype):
    model, length, size = tiny.shared(name), 33, 4
    report = memory_report(
        model.config, seq_len=length, block_size=size, dtype="float32", kv_cache_dtype=kv_cache_dtype
    )
    for plan, dtype in zip(report.plans[1:], ("auto", kv_cache_dtype), strict=True):
        stats = cached(model, length, block_size=size, kv_cache_dtype=dtype).stats()
        assert sum(group.num_layers for group in plan.groups) == stats.num_layers
        windowed = any(group.sliding_window for group in plan.groups)
        if not windowed:
            assert plan.bytes_per_request == stats.bytes_held
        else:  # how many blocks a window touches depends on where it begins
            spare = sum(group.token_bytes * size for group in plan.groups if group.sliding_window)
            assert stats.bytes_held <= plan.bytes_per_request <= stats.bytes_held + spare


@pytest.mark.parametrize("name", ["mistral_swa", "gemma3"])
def test_no_window_takes_more_blocks_than_said(name):
    model = tiny.shared(name)
    for size in (3, 4, 16):
        most = 0
        for length in range(26, 26 + size):
            stats = cached(model, length, block_size=size).stats()
            plan = memory_report(model.config, seq_len=length, block_size=size, dtype="float32").plans[1]
            assert stats.bytes_held <= plan.bytes_per_request
            most = max(most, stats.bytes_held / plan.bytes_per_request)
        assert most == 1  # and some position takes them all


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "gemma3", "gpt2"])
def test_padded_static_is_a_static_cache(name):
    model, rows, length = tiny.shared(name), 3, 40
    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(torch.tensor(tiny.prompts((5,) * rows)), past_key_values=cache, use_cache=True)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    plan = memory_report(model.config, seq_len=length, mean_len=5, batch=rows, dtype="float32").plans[0]
    assert plan.batch_bytes == held


def test_lengths_below_the_longest_save_blocks():
    config = LlamaConfig(**LLAMA2_7B)
    report = memory_report(config, seq_len=2048, mean_len=100, batch=8, dtype="float16", memory="16GiB")
    padded, paged, quantized = report.plans
    assert padded.requests == 16 and paged.blocks_per_request == 7
    assert paged.bytes_per_request * 2048 == padded.bytes_per_request * 7 * 16
    assert paged.requests == 16 * GIB // paged.bytes_per_request
    assert (padded.batch_bytes, paged.batch_bytes) == (8 * GIB, 8 * paged.bytes_per_request)
    assert quantized.requests > 1.9 * paged.requests


def test_fixed_scales_count_once():
    config, length = tiny.config("llama_gqa"), 32
    options = {"seq_len": length, "dtype": "float16", "batch": 5}
    for granularity, numbers in (("per_tensor", 4), ("per_head", 4), ("k:per_channel,v:per_head", 2 * 16 + 2)):
        plan = memory_report(config, kv_scale_granularity=granularity, **options).plans[2]
        assert plan.bytes_per_token == 3 * 2 * (16 + 16)
        assert plan.batch_bytes == 5 * length * plan.bytes_per_token + 3 * numbers * 4


def test_layers_that_stay_in_the_models_dtype():
    config = tiny.config("llama_gqa")
    plan = memory_report(config, seq_len=16, dtype="float16", skip_layers=[1]).plans[2]
    assert plan.bytes_per_token == 2 * 2 * 2 * (16 + 4) + 2 * 2 * 16 * 2
    assert sorted(group.kv_cache_dtype for group in plan.groups) == ["auto", "fp8_e4m3"]
    with pytest.raises(ValueError, match="layer 9"):
        memory_report(config, seq_len=16, skip_layers=[9])


# What a config tells


def folder(tmp_path, **settings):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_file_alone_is_enough(tmp_path):
    path = folder(tmp_path, model_type="llama", torch_dtype="float16", **LLAMA2_7B)  # no KV heads, no head_dim
    for source in (path, str(path), path / "config.json"):
        report = memory_report(source, seq_len=2048)
        assert report.plans[0].bytes_per_request == GIB and report.dtype == "float16" and not report.dtype_is_assumed


def test_head_dim_that_is_not_hidden_over_heads(tmp_path):
    path = folder(tmp_path, model_type="llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, head_dim=80)
    assert {shape[1:4] for shape in kv_shapes(LlamaConfig.from_pretrained(path))} == {(4, 80, 80)}


def test_names_of_gpt2(tmp_path):
    path = folder(tmp_path, model_type="gpt2", n_embd=768, n_layer=12, n_head=12)
    report = memory_report(path, seq_len=1024)
    assert report.dtype == "bfloat16" and report.dtype_is_assumed
    assert report.plans[1].bytes_per_request == 2 * 12 * 768 * 2 * 1024


def test_composite_config():
    text = {**tiny.BASE, **tiny.FAMILIES["gemma3"][1], "model_type": "gemma3_text"}
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    assert kv_shapes(config) == kv_shapes(tiny.config("gemma3"))
    before = config.to_json_string()
    assert memory_report(config, seq_len=64).model_type == "gemma3_text"
    assert config.to_json_string() == before


@pytest.mark.parametrize(
    "name", [name for name in tiny.FAMILIES if name not in ("deepseek_v3", "gemma3n", "qwen3_next")]
)
def test_names_give_what_a_forward_shows(name):
    """Where a model does not run without memory, the names of its config's fields have to do."""
    config = tiny.config(name)
    assert {shape[1:4] for shape in kv_shapes(config)} == {_named(config)}


def test_a_config_that_does_not_tell():
    with pytest.raises(ValueError, match="encoder-decoder"):
        memory_report(CONFIG_MAPPING["t5"](), seq_len=8)
    with pytest.raises(ValueError, match="must be a model's config"):
        memory_report({"hidden_size": 4}, seq_len=8)
    with pytest.raises(ValueError, match="does not tell"):
        _named(tiny.config("deepseek_v3"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq_len": 0}, "seq_len"),
        ({"batch": 0}, "batch"),
        ({"block_size": 0}, "block_size"),
        ({"mean_len": 99}, "mean_len=99"),
        ({"memory": "16 Gb of it"}, "memory"),
        ({"dtype": "int32"}, "floating"),
        ({"kv_cache_dtype": "fp4"}, "fp4"),
    ],
)
def test_errors(options, said):
    with pytest.raises(ValueError, match=said):
        memory_report(tiny.config("llama_gqa"), **{"seq_len": 8, **options})


def test_sizes():
    sizes = [parse_size(text) for text in ("12", 12, "1KiB", "1.5 GiB", "80GB", "2mib", "1TiB")]
    assert sizes == [12, 12, 1024, 3 * GIB // 2, 80 * 10**9, 2**21, 2**40]
    assert [format_size(n) for n in (512, 1536, GIB, 5 * 2**40)] == ["512 B", "1.50 KiB", "1.00 GiB", "5.00 TiB"]


# The command


def command(*arguments):
    return runner.invoke(app, ["memory", *map(str, arguments)])


def test_command_prints_the_plans_side_by_side(tmp_path):
    path = folder(tmp_path, model_type="llama", dtype="float16", **LLAMA2_7B)
    result = command(path, "--seq-len", 2048, "--batch", 4, "--memory", "16GiB")
    assert result.exit_code == 0, result.output
    for word in ("padded static", "paged, fp8_e4m3", "1.00 GiB", "4.00 GiB", "512.00 KiB", "264.00 KiB", "128"):
        assert word in result.output, word
    row = next(line for line in result.output.splitlines() if "requests in 16.00 GiB" in line)
    assert [part.strip() for part in row.split("│") if part.strip()][1:] == ["16", "16", "31"]


def test_command_prints_json(tmp_path):
    path = folder(tmp_path, model_type="llama", dtype="float16", **LLAMA2_7B)
    result = command(path, "--seq-len", 2048, "--json", "--kv-cache-dtype", "k:int8,v:fp8_e4m3")
    report = json.loads(result.stdout)
    assert [plan["name"] for plan in report["plans"]] == ["padded static", "paged", "paged, k:int8,v:fp8_e4m3"]
    assert report["plans"][0]["bytes_per_request"] == GIB and report["plans"][0]["requests"] is None
    kept = json.loads(command(path, "--seq-len", 2048, "--json", "--skip-layer", 0, "--skip-layer", 3).stdout)
    assert [group["num_layers"] for group in kept["plans"][2]["groups"]] in ([2, 30], [30, 2])
    assert command(path, "--seq-len", 2048, "--skip-layer", 32).exit_code == 1


def test_command_says_what_is_wrong(tmp_path):
    path = folder(tmp_path, model_type="llama", **LLAMA2_7B)
    for arguments in (["--memory", "much"], ["--kv-cache-dtype", "fp4"], ["--mean-len", 99]):
        result = command(path, "--seq-len", 8, *arguments)
        assert result.exit_code == 1 and "error: " in result.output and "Traceback" not in result.output
    assert command(tmp_path / "nothing", "--seq-len", 8).exit_code == 1
    assert command(path).exit_code == 2


def test_hybrid_layers_are_named(tmp_path):
    tiny.config("qwen3_next").save_pretrained(tmp_path)
    result = command(tmp_path, "--seq-len", 64)
    assert result.exit_code == 0 and "3 of the layers keep no keys and values" in result.output
