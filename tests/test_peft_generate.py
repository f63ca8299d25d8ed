"""Paged `generate` of models with adapters of PEFT: the text of plain `generate`, whichever are active.

Contract: switching, disabling and merging adapters between two calls changes the text as it does for plain generate,
and the call leaves the model as it was.
"""

import pytest
import torch
from batcher_helpers import NEW, greedy, plain
from peft import PromptTuningConfig, get_peft_model
from peft_helpers import MODELS, condition, draw, lora, text, wrapped
from tiny_models import build, padded, prompts

from hf_paged.adapters import BASE


@pytest.mark.parametrize("kind", MODELS)
def test_paged_generate_follows_the_models_adapters(kind):
    model, rows = MODELS[kind](), prompts((5, 17, 12))
    ids, mask = padded(rows)

    def paged():
        out = model.generate(input_ids=ids, attention_mask=mask, cache_implementation="paged", **greedy())
        return out[:, ids.shape[1] :].tolist()

    def check_now():
        before = condition(model)
        assert paged() == [plain(model, row, **greedy()) for row in rows]
        assert condition(model) == before

    check_now()
    model.set_adapter("y")
    check_now()
    if kind == "wrapped":
        with model.disable_adapter():
            check_now()
        model.merge_adapter()
        check_now()
        model.unmerge_adapter()
        check_now()
        merged = model.merge_and_unload()
        out = merged.generate(ids, attention_mask=mask, cache_implementation="paged", **greedy())
        assert out[:, ids.shape[1] :].tolist() == [plain(merged, row, **greedy()) for row in rows]
    else:
        model.disable_adapters()
        check_now()
        model.enable_adapters()
        check_now()


def test_paged_generate_goes_through_one_batcher_for_all_adapters():
    model, ids = wrapped(), torch.tensor(prompts((7,)))
    texts = []
    for name in ("x", "y", "x"):
        model.set_adapter(name)
        texts.append(model.generate(input_ids=ids, cache_implementation="paged", **greedy()).tolist())
        found = model.get_base_model()._hf_paged_batchers.batcher
        assert found is not None and (name != "x" or not texts[1:] or texts[0] == texts[2])
    assert found.stats().new_tokens == 3 * NEW and texts[0] != texts[1]


def test_adapters_chosen_by_row_go_through_the_loop():
    model, rows = wrapped(), prompts((9, 9, 9))
    names, ids = ["x", "y", BASE], torch.tensor(rows)
    common = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **greedy()}
    active = model.generate(**common, cache_implementation="paged").tolist()  # through a batcher
    for _ in range(3):
        paged = model.generate(**common, adapter_names=names, cache_implementation="paged").tolist()
        assert paged == model.generate(**common, adapter_names=names).tolist()
        for name, row, line in zip(names, rows, paged, strict=True):
            assert line[9:] == text(model, name, row)
    assert all(not module._forward_pre_hooks for module in model.modules())
    made = model.get_base_model()._hf_paged_batchers.batcher.stats().new_tokens
    assert model.generate(**common, cache_implementation="paged").tolist() == active != paged
    assert model.get_base_model()._hf_paged_batchers.batcher.stats().new_tokens == 2 * made == 2 * 3 * NEW


@pytest.mark.parametrize("kind", ["virtual", "later"])
def test_generate_serves_what_cannot_be_packed(kind):
    base = build("llama_gqa")
    if kind == "virtual":
        model = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    else:
        model = draw(get_peft_model(base, lora(alora_invocation_tokens=[7, 8]))).eval()
    ids = torch.tensor([[5, 9, 7, 8, 11, 6]])
    want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy())
    got = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="paged", **greedy())
    assert got.tolist() == want.tolist()
