"""Models that accelerate has placed: offloaded to the CPU or a disk, or spread over devices.

Contract: such a model gives, packed, the text of plain `generate` of the same model before it was placed. There is one
device here: what several need is tested where they are told apart, with the "meta" device as the second one.
"""

import functools
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from batcher_helpers import NEW, batcher, check, check_idle, expected, greedy, model_of
from tiny_models import assert_same_text, build, padded, prompts
from transformers.masking_utils import causal_mask_function

from hf_paged import ContinuousBatcher, PackingError, PagedCacheConfig
from hf_paged.attention import hf_paged_mask
from hf_paged.kv_pool import PoolKey
from hf_paged.lazy import LazyMask
from hf_paged.packed_cache import LayerSpec, PackedPools
from hf_paged.packed_metadata import StepBuilder
from hf_paged.packing import packing_plan
from hf_paged.placement import input_device, placement
from hf_paged.request import Request
from hf_paged.scheduler import Scheduler, SchedulerConfig

CPU, META = torch.device("cpu"), torch.device("meta")
NAMES = ("llama_gqa", "gemma2", "gpt2")
LENGTHS = (5, 17, 12)


def device_map(model, on_disk: tuple[str, ...]) -> dict[str, str]:
    """Every layer and every other part on the CPU, those whose names end in `on_disk` on the disk."""
    base = model.base_model_prefix
    parts = [name for name, _ in model.named_children() if name != base]
    for name, child in getattr(model, base).named_children():
        if isinstance(child, torch.nn.ModuleList):
            parts += [f"{base}.{name}.{index}" for index in range(len(child))]
        else:
            parts.append(f"{base}.{name}")
    return {part: "disk" if part.endswith(on_disk) else "cpu" for part in parts}


def cpu_offload(name: str, folder: Path):
    return accelerate.cpu_offload(build(name), execution_device=CPU, offload_buffers=True)


def disk_offload(name: str, folder: Path):
    return accelerate.disk_offload(build(name), str(folder), execution_device=CPU)


def one_layer_on_disk(name: str, folder: Path):
    model = build(name)
    return accelerate.dispatch_model(model, device_map(model, (".1",)), main_device="cpu", offload_dir=str(folder))


def embeddings_on_disk(name: str, folder: Path):
    model = build(name)
    places = device_map(model, ("embed_tokens", "wte", "lm_head", ".2"))
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


def from_pretrained(name: str, folder: Path, device_map):
    model = build(name)
    model.save_pretrained(folder / "model")
    placed = type(model).from_pretrained(
        folder / "model", device_map=device_map, offload_folder=str(folder / "offload"), attn_implementation="eager"
    )
    placed.generation_config = model.generation_config
    return placed


WAYS = {
    "cpu_offload": cpu_offload,
    "disk_offload": disk_offload,
    "one_layer_on_disk": one_layer_on_disk,
    "embeddings_on_disk": embeddings_on_disk,
    "from_pretrained_auto": functools.partial(from_pretrained, device_map="auto"),
    "from_pretrained_disk": functools.partial(from_pretrained, device_map={"": "disk"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_placed_model_gives_the_text_of_the_model_itself(name, way, tmp_path, monkeypatch):
    model = WAYS[way](name, tmp_path)
    offloaded = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    assert offloaded == (set() if way == "from_pretrained_auto" else {"meta"})
    rows = prompts(LENGTHS)
    with batcher(model, chunked_prefill_size=7) as one:
        check(name, rows, one.generate(rows, greedy()))
        check_idle(one)
    plan = packing_plan(model)
    assert plan.input_device == CPU and plan.logits_to_keep
    assert {spec.key.device for spec in plan.specs.values()} == {CPU}
    assert len({spec.key for spec in plan.specs.values()}) == (2 if name == "gemma2" else 1)
    # generate takes the packed way, and the second call finds the batcher of the first.
    made = []
    monkeypatch.setattr(
        "hf_paged.batched.ContinuousBatcher", lambda *a, **k: made.append(ContinuousBatcher(*a, **k)) or made[-1]
    )
    ids, mask = padded(rows)
    for _ in range(2):
        out = model.generate(ids, attention_mask=mask, cache_implementation="paged", **greedy())
        for row, new in zip(rows, out[:, ids.shape[1] :].tolist(), strict=True):
            assert_same_text(model_of(name), row, new, expected(name, row))
    assert len(made) == 1 and made[0].stats().new_tokens == 2 * NEW * len(rows)
    # The hooks still do their work: what was offloaded is offloaded again.
    assert {parameter.device.type for parameter in model.parameters()} - {"cpu"} == offloaded


def test_the_batcher_of_generate_outlasts_offloading_to_where_it_computes_already():
    model = build("llama_gqa")
    ids = torch.tensor(prompts((9,)))
    want = expected("llama_gqa", ids[0].tolist())

    def text():
        return model.generate(ids, cache_implementation="paged", **greedy())[0, 9:].tolist()

    assert text() == want
    first = model._hf_paged_batchers.batcher
    accelerate.cpu_offload(model, execution_device=CPU)
    assert text() == want and model._hf_paged_batchers.batcher is first
    remove_hook_from_submodules(model)
    assert text() == want and model._hf_paged_batchers.batcher is first
    # Anything else is another placement, with other pools.
    model.lm_head._hf_hook = AlignDevicesHook(execution_device="cpu:0")
    assert text() == want and model._hf_paged_batchers.batcher is not first


def test_beam_search_of_an_offloaded_model_goes_through_the_loop(tmp_path):
    model, ids = disk_offload("llama_gqa", tmp_path), torch.tensor(prompts((9,)))
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    want = build("llama_gqa").generate(ids, **settings)
    assert model.generate(ids, cache_implementation="paged", **settings).tolist() == want.tolist()


def test_a_model_without_its_parameters_is_refused():
    model = build("llama_gqa").to("meta")
    with pytest.raises(PackingError, match="meta device and no accelerate hook"):
        ContinuousBatcher(model)


# Several devices, told apart


def test_a_module_computes_where_the_nearest_hook_says():
    model = build("llama_gqa", num_hidden_layers=2)
    plain = placement(model)
    assert input_device(model) == CPU and {device for device, _ in plain} == {CPU}
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))  # says nothing about devices
    assert placement(model) == plain
    add_hook_to_module(model.model, AlignDevicesHook(execution_device="cpu"))
    # Hooks of a place that does not exist here, put there without moving anything.
    model.model.layers[1]._hf_hook = AlignDevicesHook(execution_device=1, offload=True)
    model.model.layers[1].mlp._hf_hook = SequentialHook(AlignDevicesHook(), CpuOffload(execution_device=META))
    model.lm_head._hf_hook = AlignDevicesHook(execution_device=torch.device("cuda", 0))
    assert input_device(model) == CPU
    found = dict(zip((name for name, _ in model.named_parameters()), placement(model), strict=True))
    assert found["model.layers.0.mlp.up_proj.weight"] == ("cpu", torch.float32)
    assert found["model.layers.1.self_attn.q_proj.weight"] == (1, torch.float32)
    assert found["model.layers.1.mlp.up_proj.weight"] == (META, torch.float32)
    assert found["lm_head.weight"] == (torch.device("cuda", 0), torch.float32)
    model.model.embed_tokens._hf_hook = AlignDevicesHook(execution_device="meta")
    assert input_device(model) == META


def spread_pools(config=None) -> PackedPools:
    """Three layers: two on the CPU, of which one has a window, and one elsewhere."""
    keys = [PoolKey(2, 16, 16, torch.float32, device, window) for device, window in ((CPU, 0), (META, 0), (CPU, 8))]
    specs = {layer: LayerSpec(key, (key.dtype, key.dtype)) for layer, key in enumerate(keys)}
    return PackedPools(specs, config or PagedCacheConfig(block_size=4, num_blocks=20), max_num_seqs=2, chunk=8)


def test_each_layers_pool_lies_on_its_device():
    pools = spread_pools()
    for layer, device in enumerate((CPU, META, CPU)):
        pool = pools.pools[pools.group_of[layer]]
        assert {tensor.device for tensor in pool.pages(layer).tensors()} == {device}
    assert pools.devices == [CPU, META, CPU] and len(pools.groups) == 3


def test_each_device_has_a_budget_of_its_own(monkeypatch):
    free = {CPU: 1_000_000, META: 50_000}
    monkeypatch.setattr("hf_paged.kv_pool.MemoryBudget._limit", lambda self, device: (free[device], free[device], 1.0))
    pools = spread_pools(PagedCacheConfig(block_size=4))
    per_block = 2 * 4 * 32 * 4
    windowed = pools.groups[2].max_blocks
    assert pools.groups[1].max_blocks == 50_000 // per_block
    assert 0 < windowed < pools.groups[0].max_blocks
    assert (pools.groups[0].max_blocks + windowed) * per_block <= 1_000_000


def test_a_steps_tensors_lie_where_they_are_read():
    pools = spread_pools()
    scheduler = Scheduler(pools.groups, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16))
    builder = StepBuilder(scheduler.batch, pools.windows, 4, 16, CPU, pools.devices)
    for key, length in enumerate((3, 5)):
        scheduler.add(Request(str(key), range(10, 10 + length), key=key, max_tokens=20))
    for tokens in ([7, 8], [9, 9]):  # a step of prompts, and one of decoding rows
        output = scheduler.schedule()
        step = builder.build(output)
        assert step.input_ids.device == step.position_ids.device == CPU
        for group, device in zip(step.groups, (CPU, META, CPU), strict=True):
            tensors = [group.slot_mapping, group.decode_tables, group.decode_lens]
            if step.chunks:
                tensors += [group.prefill_tables, group.prefill_lens, group.query_start_loc]
            assert {tensor.device for tensor in tensors} == {device}
        scheduler.update(output, tokens, {})


def test_a_mask_that_is_brought_to_another_device_stays_what_it_is():
    columns = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0}
    mask = hf_paged_mask(
        **sizes, mask_function=causal_mask_function, attention_mask=columns, config=None, dtype=torch.float32
    )
    assert type(mask) is LazyMask and mask.to("cpu") is mask
    moved = accelerate.utils.send_to_device({"attention_mask": mask}, META)["attention_mask"]
    assert type(moved) is LazyMask and moved.device == META and moved.shape == mask.shape
    assert (moved.pattern, moved.packed, moved.q_offset) == (0, None, 0)
    assert moved.mask_kwargs["device"] == META
    assert moved.first_real_columns().tolist() == [2, 0]
    assert moved.dense().device == META and mask.dense().device == CPU
    assert moved.build("eager").shape == mask.shape
    # Any other change is made to the values.
    assert type(mask.to(torch.float64)) is torch.Tensor and mask.to(torch.float64).dtype == torch.float64
