"""Batches over 8-bit blocks: every request's text is that of a contiguous 8-bit cache, whatever happens to its blocks.

The oracle is `quantized_reference.reference`, in float64 and token for token where nothing else is said.
"""

import pytest
import torch
from batcher_helpers import batcher, check_idle, greedy
from peft_helpers import draw, lora
from quantized_reference import DTYPES, SETTINGS, double, random_text, reference, same_text, single, text
from tiny_models import build, prompts, shared
from torch._dynamo.utils import counters

import hf_paged
from hf_paged import KVScales, packed_attention, shared_prefix
from hf_paged.adapters import BASE
from hf_paged.model_identity import ModelIdentity
from hf_paged.packing import packing_plan

NEW = 8


def check(name: str, rows, outputs, setting: str, new: int = NEW) -> None:
    assert [list(output.output_token_ids) for output in outputs] == [reference(name, row, setting, new) for row in rows]


@pytest.mark.parametrize("setting", ["fp8_e4m3", "fp8_e5m2", "by_layer"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_swa", "gemma2", "gpt2", "deepseek_v3"])
def test_text_in_a_tiny_pool(name, setting):
    """Chunks of 9 beside decoding rows, and so few blocks that requests give way and are computed again."""
    rows = prompts((5, 17, 33, 1))
    settings = {"cache_config": {"num_blocks": 13, **SETTINGS[setting]}}
    with batcher(double(name), **settings, max_num_batched_tokens=13, chunked_prefill_size=9) as one:
        check(name, rows, one.generate(rows, greedy(NEW)), setting)
        assert one._engine.runner.cache.num_gathers == 0 or name == "deepseek_v3"
        check_idle(one)


@pytest.mark.parametrize("setting", ["int8", "mixed", "values_alone", "skip"])
def test_text_in_float32(setting):
    """The same through the kernels that float32 models take."""
    for name in ("llama_gqa", "gemma2"):
        rows = prompts((5, 17, 33, 12))
        with batcher(single(name), cache_config=SETTINGS[setting], chunked_prefill_size=9) as one:
            for row, output in zip(rows, one.generate(rows, greedy(NEW)), strict=True):
                same_text(name, row, list(output.output_token_ids), setting)
            assert one._engine.runner.cache.num_gathers == 0


def test_sampled_tokens_of_one_seed_do_not_depend_on_the_batch():
    model, rows = double("llama_gqa"), prompts((5, 17, 12))
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5}
    texts = []
    for chunk, most in ((64, 3), (3, 3), (5, 1)):
        config = SETTINGS["fp8_e4m3"]
        with batcher(model, cache_config=config, chunked_prefill_size=chunk, max_num_seqs=most) as one:
            ids = [one.add_request(row, generation_config=settings, seed=index) for index, row in enumerate(rows)]
            texts.append([list(one.result(request).output_token_ids) for request in ids])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != [reference("llama_gqa", row, "fp8_e4m3", NEW) for row in rows]


@pytest.mark.parametrize(
    "name, setting", [("llama_gqa", "fp8_e4m3"), ("mistral_swa", "int8"), ("deepseek_v3", "mixed")]
)
def test_logits_do_not_depend_on_chunks(name, setting):
    """Attention reads what the blocks hold, its own chunk included: also the last token of a prompt in one piece."""
    row, seen = random_text(48, 3), []
    for chunk in (1, 3, 16, 17, 64):
        with batcher(
            double(name), cache_config=SETTINGS[setting], chunked_prefill_size=chunk, max_num_batched_tokens=64
        ) as one:
            output = one.generate([row], greedy(2), prompt_logprobs=0)[0]
            seen.append(torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]]))
    assert all(torch.allclose(logprobs, seen[0], atol=1e-5, rtol=0) for logprobs in seen)


@pytest.mark.parametrize("setting", ["fp8_e4m3", "skip"])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "deepseek_v3"])
def test_prefixes_are_shared_in_whole_blocks_and_in_part(name, setting):
    system = random_text(22, 4)
    rows = [[*system, *tail] for tail in prompts((3, 5, 1), seed=5)]
    with batcher(double(name), cache_config=SETTINGS[setting]) as one:
        outputs = [one.generate([row], greedy(NEW))[0] for row in rows]
        check(name, rows, outputs, setting)
        assert [output.num_cached_tokens for output in outputs][1:] == [22, 22]  # five blocks, and two tokens more
        assert all(output.num_cached_tokens for output in one.generate(rows, greedy(NEW)))
        check_idle(one)


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_samples_of_one_prompt_part_inside_a_block(length):
    row = random_text(length, 6)
    config = {"block_size": 16, **SETTINGS["mixed"]}
    with batcher(double("llama_gqa"), cache_config=config) as one:
        many = one.generate([row], greedy(NEW, num_return_sequences=3, do_sample=True, top_k=1))
        check("llama_gqa", [row] * 3, many, "mixed")
        check_idle(one)


def test_rows_that_share_a_prefix_attend_to_it_once(monkeypatch):
    found, real = [], packed_attention.kernels.paged_decode_shared
    monkeypatch.setattr(
        packed_attention.kernels, "paged_decode_shared", lambda *args, **more: found.append(more) or real(*args, **more)
    )
    monkeypatch.setitem(shared_prefix.LEAST_SHARED_TOKENS, "cpu", 8)
    for module in ("hf_paged.shared_prefix", "hf_paged.packed_metadata"):
        monkeypatch.setattr(f"{module}.LEAST_ROWS", 2)
    rows = [[*random_text(20, 7), *tail] for tail in prompts((3, 7, 1), seed=3)] + prompts((6,), seed=4)
    for setting in ("fp8_e4m3", "keys_alone"):
        with batcher(double("gemma2"), cache_config={"num_blocks": 120, **SETTINGS[setting]}) as one:
            check("gemma2", rows, one.generate(rows, greedy(NEW)), setting)
        assert found and all(more["k_scale"].dim() == 3 for more in found)
        found.clear()


def test_a_compiled_step():
    model, rows = build("llama_gqa", dtype=torch.float64, num_hidden_layers=2), prompts((5, 17, 12))
    settings = {"kv_cache_dtype": "k:int8,v:fp8_e4m3", "skip_layers": {1: "v:fp8_e5m2"}}
    with batcher(model, cache_config=settings, max_num_seqs=3, compile="eager") as one:
        graphs = counters["stats"]["unique_graphs"]
        outputs = one.generate(rows, greedy(NEW))
        assert [list(output.output_token_ids) for output in outputs] == [
            text(model, row, settings, NEW) for row in rows
        ]
        assert one.stats().compiled_steps >= NEW - 1 and counters["stats"]["unique_graphs"] == graphs


def test_adapters_beside_each_other():
    model = build("llama_gqa", dtype=torch.float64)
    model.add_adapter(lora(), adapter_name="x")
    draw(model).eval()
    rows, settings = prompts((5, 17)), SETTINGS["fp8_e4m3"]
    with batcher(model, cache_config=settings) as one:
        ids = [
            one.add_request(row, generation_config=greedy(NEW), adapter_name=name)
            for row, name in zip(rows, ("x", BASE), strict=True)
        ]
        got = [list(one.result(request).output_token_ids) for request in ids]
    want = [text(model, rows[0], settings, NEW)]
    model.disable_adapters()
    want.append(text(model, rows[1], settings, NEW))
    assert got == want != [want[1], want[0]]


def test_generate_takes_the_setting_and_keeps_batchers_apart():
    model, row = double("llama_gqa"), prompts((17,))[0]
    ids = torch.tensor([row])
    for setting in ("fp8_e4m3", "int8", "fp8_e4m3"):
        config = hf_paged.PagedCacheConfig(**SETTINGS[setting])
        for cache_config in (SETTINGS[setting], config):
            out = model.generate(ids, cache_implementation="paged", cache_config=cache_config, **greedy(NEW))
            assert out[0, 17:].tolist() == reference("llama_gqa", row, setting, NEW)
        assert model._hf_paged_batchers.batcher.cache_config == config
    hf_paged.release(model)


def test_a_model_is_tried_without_8_bits(monkeypatch):
    """What 8 bits lose is no fault of a model: it is admitted by what it computes in its own dtype."""
    model, formats = build("llama_gqa"), []
    real = hf_paged.packing.PackedPools.__init__
    monkeypatch.setattr(
        hf_paged.packing.PackedPools,
        "__init__",
        lambda self, specs, config, *rest: formats.append(config.kv_cache_dtype) or real(self, specs, config, *rest),
    )
    with batcher(model, cache_config=SETTINGS["fp8_e5m2"]) as one:
        assert formats[-1] == "fp8_e5m2" and set(formats[:-1]) == {"auto"} and len(formats) > 1
        assert not any(spec.key.format.is_quantized for spec in packing_plan(model).specs.values())
        assert all(spec.key.format.is_quantized for spec in one._engine.runner.pools.specs.values())


def test_more_requests_run_at_once_in_the_same_memory():
    """In the bytes of 40 blocks of bfloat16, a block for each request, and none of them gives way."""
    model, most, size = build("llama_gqa", dtype=torch.bfloat16, head_dim=64), {}, None
    for name in ("auto", "fp8_e4m3", "int8"):
        config = {"kv_cache_dtype": name, "block_size": 8, "enable_prefix_caching": False}
        with batcher(model, cache_config={**config, "num_blocks": 1}) as one:
            block = one.stats().bytes_total
        size = size or 40 * block
        with batcher(model, cache_config={**config, "num_blocks": size // block}) as one:
            assert one.stats().bytes_total <= size
            for row in prompts((4,) * 100):
                one.add_request(row, generation_config=greedy(5))
            most[name] = 0
            while one.has_work:
                one.step()
                most[name] = max(most[name], one.stats().running)
            assert one.stats().preemptions == 0
    assert most["auto"] == 40 and min(most["fp8_e4m3"], most["int8"]) >= 1.85 * 40


def first_hash(model, config, row) -> int:
    """The hash that a router is told of a prompt's first block."""
    told = []
    with batcher(model, cache_config=config, on_event=lambda kind, event: told.append((kind, event))) as one:
        one.generate([row], greedy(1))
    return next(event.block_hash for kind, event in told if kind == "block_stored")


def fixed(path, model, granularity="per_head", name="fp8_e4m3", factor=0.01) -> dict:
    """Settings with scales of a model, in a file; K by the granularity."""
    shape = {"per_tensor": (), "per_head": (2,), "per_channel": (2, 16)}[granularity]
    generator = torch.Generator().manual_seed(3)
    draws = [factor * (1 + torch.rand(shape, generator=generator)) for _ in range(3)]
    value = [factor * (1 + torch.rand((2,), generator=generator)) for _ in range(3)]
    scales = KVScales(
        dict(enumerate(draws)), dict(enumerate(value)), name, name, granularity, "per_head", ModelIdentity.of(model)
    )
    scales.save(path)
    kinds = {"k": granularity, "v": "per_head"}
    return {"kv_cache_dtype": name, "kv_scale_granularity": kinds, "kv_scales": path}


def test_hashes_tell_formats_and_scales_apart(tmp_path):
    model, row = shared("llama_gqa"), random_text(9, 8)
    configs = [{}, *(SETTINGS[setting] for setting in ("fp8_e4m3", "fp8_e5m2", "skip", "mixed", "as_they_come"))]
    configs += [fixed(tmp_path / f"{factor}", model, factor=factor) for factor in (0.01, 0.02)]
    hashes = [first_hash(model, config, row) for config in configs]
    assert len(set(hashes)) == len(configs)
    copied = fixed(tmp_path / "copy", model)  # the same scales from another file are the same
    assert [first_hash(model, config, row) for config in (configs[0], configs[1], copied)] == [*hashes[:2], hashes[6]]


# Fixed scales


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "per_channel"])
def test_fixed_scales(granularity, name, tmp_path):
    model, rows = double("llama_gqa"), prompts((17, 5))
    factor = {"fp8_e4m3": 0.02, "fp8_e5m2": 0.0002, "int8": 0.05}[name]
    settings = fixed(tmp_path / "scales.safetensors", model, granularity, name, factor)
    want = [text(model, row, settings, NEW) for row in rows]
    with batcher(model, cache_config=settings) as one:
        outputs = one.generate(rows, greedy(NEW))
        assert [list(output.output_token_ids) for output in outputs] == want
        stats, specs = one.stats(), one._engine.runner.pools.specs
        assert stats.bytes_total == stats.blocks_total * 4 * 2 * 2 * 16 * len(specs)  # and no scale beside the tokens
    out = model.generate(
        torch.tensor(rows[:1]), past_key_values=hf_paged.PagedCache(model.config, settings), **greedy(NEW)
    )
    assert out[0, 17:].tolist() == want[0]


def test_scales_of_other_weights_stop_a_batcher(tmp_path):
    """CASES B39: what was measured before the weights changed is not used after it."""
    model, row = build("llama_gqa"), random_text(9, 9)
    settings = fixed(tmp_path / "scales.safetensors", model)
    with batcher(model, cache_config=settings) as one:
        one.generate([row], greedy(2))
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.mul_(2)
        for _ in range(2):
            with pytest.raises(ValueError, match="measured on another model"):
                one.generate([row], greedy(2))
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.div_(2)
        one.generate([row], greedy(2))
        check_idle(one)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2)
    for refused in (
        lambda: batcher(model, cache_config=settings),
        lambda: model.generate(torch.tensor([row]), cache_implementation="paged", cache_config=settings),
    ):
        with pytest.raises(ValueError, match="measured on another model"):
            refused()
