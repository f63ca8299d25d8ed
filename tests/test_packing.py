"""Which models are admitted to packed forwards, and why others are not: models broken on purpose, and the plan."""

import time

import pytest
import torch
from batcher_helpers import batcher, check, greedy, model_of
from more_models import VISION, build_more, build_vision
from tiny_models import assert_same_text, build, oracle, prompts, widen
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hf_paged
from hf_paged import packing
from hf_paged.attention import calls
from hf_paged.packing import packing_plan


def refusal(model) -> str:
    with pytest.raises(hf_paged.PackingError) as caught:
        packing_plan(model)
    return str(caught.value)


def test_the_plan_tells_what_was_learnt():
    plan = packing_plan(model_of("gemma3"))
    assert plan.windows == (8, 8, None) and plan.logits_to_keep
    assert {index: spec.key.sliding_window for index, spec in plan.specs.items()} == {0: 8, 1: 8, 2: 0}
    assert (plan.position_limit, plan.max_position, plan.input_device.type) == (None, None, "cpu")
    assert packing_plan(model_of("gpt2")).max_position == 512
    shared_layers = packing_plan(model_of("gemma3n"))
    assert sorted(shared_layers.specs) == [0, 1, 2]  # the last three read what others keep
    latent = packing_plan(model_of("deepseek_v3")).specs[0].key
    assert (latent.num_kv_heads, latent.head_dim_k, latent.head_dim_v) == (1, 16, 8)


def test_it_is_tried_once_for_each_configuration(monkeypatch):
    model, tries = build("llama_gqa"), []
    original = packing._try
    monkeypatch.setattr(packing, "_try", lambda model: tries.append(1) or original(model))
    plan = packing_plan(model)
    assert packing_plan(model) is plan and len(tries) == 1
    model.to(torch.bfloat16)
    assert packing_plan(model).specs[0].dtypes == (torch.bfloat16,) * 2 and len(tries) == 2
    model.to(torch.float32)
    assert packing_plan(model) is plan and len(tries) == 2
    broken = build("bloom")
    assert refusal(broken) == refusal(broken) and len(tries) == 3


def test_trying_leaves_no_trace():
    model = build("gemma2").train()
    before, random = model.config._attn_implementation, torch.random.get_rng_state()
    packing_plan(model)
    assert model.training and model.config._attn_implementation == before
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.demo_model
def test_the_demo_model_is_tried_in_under_a_second(demo_model):
    model, _ = demo_model
    packing._plans.pop(model, None)
    torch.set_num_threads(1)
    started = time.thread_time()
    packing_plan(model)
    assert time.thread_time() - started < 3  # thread CPU time; under one on a machine that does nothing else


class TestModelsThatWouldBeWrong:
    """Each is a llama whose forward was broken in the way of some real model."""

    def llama(self, **changes):
        return build("llama_gqa", **changes)

    def test_positions_from_the_caches_length(self):
        model = self.llama()
        layer = model.model.layers[1].self_attn
        original = layer.forward

        def forward(hidden_states, *args, past_key_values=None, **kwargs):
            scale = 1 + 0.1 * (past_key_values.get_seq_length(1) > 0)
            return original(hidden_states * scale, *args, past_key_values=past_key_values, **kwargs)

        layer.forward = forward
        assert "other logits for two packed sequences" in refusal(model)

    def test_tokens_that_look_at_their_neighbours_in_the_row(self):
        model = self.llama()
        mlp = model.model.layers[0].mlp
        original = mlp.forward
        mlp.forward = lambda states: original(states + 0.1 * states.roll(1, dims=1))
        assert "other logits" in refusal(model)

    def test_a_mean_over_the_row(self):
        model = self.llama()
        norm = model.model.norm
        original = norm.forward
        norm.forward = lambda states: original(states - states.mean(dim=1, keepdim=True))
        assert "other logits" in refusal(model)

    def test_a_mask_that_the_model_looks_into(self):
        model = self.llama()
        layer = model.model.layers[0].self_attn
        original = layer.forward

        def forward(hidden_states, *args, attention_mask=None, **kwargs):
            return original(hidden_states, *args, attention_mask=attention_mask + 0.0, **kwargs)

        layer.forward = forward
        model.set_attn_implementation("eager")
        assert "looks into its attention mask" in refusal(model)

    def test_keys_without_a_cache(self):
        model = self.llama()
        layer = model.model.layers[2].self_attn
        original = layer.forward
        layer.forward = lambda *args, past_key_values=None, **kwargs: original(*args, **kwargs)
        assert "not those of packed sequences" in refusal(model) or "plain keys" in refusal(model)

    def test_what_fails_is_still_served_by_generate(self):
        model = build_more("llama4")
        refusal(model)
        ids = torch.tensor(prompts((17,)))
        plain = model.generate(ids, **greedy())
        assert torch.equal(model.generate(ids, cache_implementation="paged", **greedy()), plain)


class TestPositions:
    """Models whose frequencies depend on the largest position of a forward."""

    def stretched(self, rope_type, **parameters):
        config = CONFIG_MAPPING["llama"](
            **{name: value for name, value in model_of("llama_gqa").config.to_dict().items() if "rope" not in name}
        )
        config.max_position_embeddings = 64
        config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}
        torch.manual_seed(0)
        return widen(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    def test_dynamic_frequencies_are_admitted_up_to_where_they_change(self):
        model = self.stretched("dynamic", factor=4.0)
        assert packing_plan(model).position_limit == 64
        with batcher(model) as one:
            with pytest.raises(ValueError, match="beyond 64 LlamaForCausalLM would change the positions of every"):
                one.add_request(prompts((60,))[0], generation_config=greedy(10))
            rows = prompts((50, 9))
            for row, output in zip(rows, one.generate(rows, greedy()), strict=True):
                ids = torch.tensor([row])
                want = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy())[0, len(row) :]
                assert list(output.output_token_ids) == want.tolist()

    def test_fixed_frequencies_have_no_limit(self):
        assert packing_plan(self.stretched("linear", factor=4.0)).position_limit is None
        assert packing_plan(model_of("llama_gqa")).position_limit is None


class TestPaths:
    """Which attention serves packed forwards."""

    @pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss", "gemma3n", "stablelm", "nemotron"])
    def test_the_operators(self, name):
        with batcher(name) as one:
            calls.clear()
            check(name, prompts(), one.generate(prompts(), greedy()))
        assert calls["packed"] and not calls["packed_dense"] + calls["dense"] + calls["paged"] + calls["uncached"]

    @pytest.mark.parametrize("name", ["deepseek_v3", "diffllama", "jetmoe"])
    def test_gathered_keys_for_models_that_transform_them(self, name):
        with batcher(name) as one:
            calls.clear()
            check(name, prompts(), one.generate(prompts(), greedy()))
        assert calls["packed_dense"] and not calls["packed"]

    @pytest.mark.parametrize("name", VISION)
    def test_vision_language_models_with_prompts_of_text(self, name):
        model, _ = build_vision(name)
        with batcher(model) as one:
            for row, output in zip(prompts(), one.generate(prompts(), greedy()), strict=True):
                assert_same_text(model, row, list(output.output_token_ids), oracle(model, row, 12))

    def test_dropout_and_training_mode_play_no_part(self):
        model = build("llama_gqa", attention_dropout=0.5).train()
        with batcher(model) as one:
            check("llama_gqa", prompts(), one.generate(prompts(), greedy()))
        assert model.training

    def test_other_calls_of_the_model_keep_their_attention(self):
        model = build("llama_gqa")
        ids = torch.tensor(prompts((17,)))
        want = model(ids).logits
        with batcher(model) as one:
            for _ in one.stream(prompts(), greedy(3)):
                torch.testing.assert_close(model(ids).logits, want)

    def test_a_model_that_was_moved_or_changed_is_noticed(self):
        model = build("llama_gqa")
        with batcher(model) as one:
            one.generate(prompts(), greedy(2))
            model.to(torch.float64)
            with pytest.raises(hf_paged.PackingError, match="make a new batcher"):
                one.generate(prompts(), greedy(2))
            one.check_integrity()
            model.to(torch.float32)
            check("llama_gqa", prompts(), one.generate(prompts(), greedy()))
