"""Adapters of PEFT chosen by request.

Contract: a request's text is that of plain `generate` with its adapter alone active, whatever runs beside it; after a
step, and after an exception in one, the model is as it was before.
"""

import threading

import accelerate
import pytest
import torch
from batcher_helpers import NEW, batcher, check_idle, greedy, in_threads
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from peft_helpers import (
    LENGTHS,
    MODELS,
    NAMES,
    add,
    check_texts,
    condition,
    draw,
    lora,
    mixed_in,
    restore,
    text,
    wrapped,
)
from tiny_models import assert_same_text, build, prompts

from hf_paged import ContinuousBatcher, PackingError
from hf_paged.adapters import BASE, adapter_state, split
from hf_paged.request import Request
from hf_paged.scheduler_output import Prefill, SchedulerOutput


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


# Requests with adapters of their own


def test_the_adapters_of_these_tests_differ(model):
    prompt = prompts((9,))[0]
    assert len({tuple(text(model, name, prompt)) for name in ("x", "y", BASE)}) == 3
    assert text(model, None, prompt) == text(model, "x", prompt)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 4, "max_num_batched_tokens": 16},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 3},  # not even a token for each decoding row
        {"cache_config": {"num_blocks": 16}},
    ],
    ids=["at_once", "chunks", "in_turns", "few_tokens", "tiny_pool"],
)
def test_each_request_gets_the_text_of_its_adapter(model, settings):
    rows, before = prompts(LENGTHS), condition(model)
    with batcher(model, **settings) as one:
        outputs = one.generate(rows, greedy(), adapter_name=list(NAMES))
        assert condition(model) == before
        check_texts(model, rows, NAMES, outputs)
        check_idle(one)
        if "cache_config" in settings:
            assert one.stats().preemptions > 0


def test_what_is_active_at_a_step_counts_for_requests_without_a_name(model):
    rows, before = prompts((7, 11)), condition(model)
    with batcher(model) as one:
        for name in ("y", "x"):
            model.set_adapter(name)
            check_texts(model, rows, (name, "x"), one.generate(rows, greedy(), adapter_name=[None, "x"]))
            assert set(adapter_state(model)[0]) == {name}
    restore(model, before)


def test_adapters_share_no_prefix(model):
    row, cached = prompts((21,))[0], []
    with batcher(model) as one:
        for name in ("x", "y", BASE, "y", "x"):
            outputs = one.generate([row], greedy(), adapter_name=name)
            check_texts(model, [row], [name], outputs)
            cached.append(outputs[0].num_cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4]


def test_several_active_adapters_and_disabled_ones_come_back():
    model, rows = mixed_in(), prompts((7, 11))
    model.set_adapter(["x", "y"])
    both = text(model, None, rows[0])
    assert both not in (text(model, "x", rows[0]), text(model, "y", rows[0]))
    with batcher(model) as one:
        outputs = one.generate(rows, greedy(), adapter_name=[None, "y"])
        assert list(outputs[0].output_token_ids) == both and adapter_state(model) == (("x", "y"), False)
        model.disable_adapters()
        before = condition(model)
        outputs = one.generate(rows * 2, greedy(), adapter_name=[None, "y", "y", BASE])
        assert condition(model) == before and adapter_state(model) == (("x", "y"), True)
        model.enable_adapters()
        check_texts(model, rows * 2, [BASE, "y", "y", BASE], outputs)


@pytest.mark.parametrize("kind", ["modules_to_save", "modules_to_save_mixed_in", "ia3", "gpt2"])
def test_other_adapters_than_lora_on_projections(kind):
    if kind == "ia3":
        config = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        model = get_peft_model(build("llama_gqa"), IA3Config(**config), adapter_name="x")
        model.add_adapter("y", IA3Config(**config))
        draw(model).eval()
    elif kind == "gpt2":
        model = get_peft_model(build("gpt2"), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), "x")
        model.add_adapter("y", LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        draw(model).eval()
    else:
        model = (mixed_in if kind.endswith("mixed_in") else wrapped)(modules_to_save=["lm_head"])
    rows, before = prompts(LENGTHS), condition(model)
    with batcher(model, chunked_prefill_size=8) as one:
        outputs = one.generate(rows, greedy(), adapter_name=list(NAMES))
        assert condition(model) == before
        check_texts(model, rows, NAMES, outputs)


def test_adapters_of_an_offloaded_model():
    model, rows = wrapped(), prompts(LENGTHS)
    want = [text(model, name, row) for name, row in zip(NAMES, rows, strict=True)]
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    before = condition(model)
    with batcher(model) as one:
        outputs = one.generate(rows, greedy(), adapter_name=list(NAMES))
    assert [list(output.output_token_ids) for output in outputs] == want
    assert condition(model) == before and {weight.device.type for weight in model.parameters()} == {"meta"}


def test_samples_and_prompt_logits_and_seeds():
    model, rows = wrapped(), prompts((9, 14))
    with batcher(model, chunked_prefill_size=6) as one:
        given: dict[str, list] = {"x": [], "y": []}
        ids = {}
        for name, row in zip("xy", rows, strict=True):
            ids[name] = one.add_request(
                row,
                generation_config=greedy(num_return_sequences=2),
                adapter_name=name,
                prompt_logprobs=0,
                on_prompt_logits=lambda start, logits, name=name: given[name].append(logits.clone()),
            )
        sampled = {"max_new_tokens": 8, "do_sample": True}
        seeded = one.add_request(rows[0], generation_config=sampled, adapter_name="y", seed=5)
        for name, row in zip("xy", rows, strict=True):
            outputs = one.result(ids[name])
            check_texts(model, [row, row], [name, name], outputs)
            model.set_adapter(name)
            with torch.no_grad():
                right = model(torch.tensor([row])).logits[0]
            torch.testing.assert_close(torch.cat(given[name]), right, rtol=1e-4, atol=1e-4)
            told = [entry.logprob for entry in outputs[0].prompt_logprobs[1:]]
            want = right.log_softmax(-1)[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(told), want, rtol=1e-4, atol=1e-4)
        first = one.result(seeded).output_token_ids
        model.set_adapter("y")
        again = one.add_request(rows[0], generation_config=sampled, seed=5)
        assert one.result(again).output_token_ids == first


def test_one_adapter_alone_keeps_the_steady_form_of_a_step():
    model, row = wrapped(), prompts((6,))[0]
    with batcher(model) as one:
        builder, forms = one._engine.runner.builder, []
        build_step = builder.build

        def noting(output):
            forms.append(output.decode_rows is None and not output.prefills)
            return build_step(output)

        builder.build = noting
        check_texts(model, [row], ["y"], one.generate([row], greedy(), adapter_name="y"))
        assert forms == [False] + [True] * (NEW - 1)


# What goes wrong


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_exception_in_the_middle_of_a_step_leaves_the_model_as_it_was(model, failing, monkeypatch):
    rows, before = prompts(LENGTHS), condition(model)
    with batcher(model) as one:
        ids = add(one, rows, NAMES)
        for _ in range(3):
            one.step()
        runner, calls = one._engine.runner, []
        forward = runner.forward

        def breaks(step):
            calls.append(adapter_state(model))
            if len(calls) == failing + 1:
                raise RuntimeError("the device is gone")
            return forward(step)

        monkeypatch.setattr(runner, "forward", breaks)
        with pytest.raises(RuntimeError, match="the device is gone"):
            one.step()
        in_order = [(("x",), False), (("x",), False), (("y",), False), (("x",), True)]  # None, "x", "y", BASE
        assert calls == in_order[: failing + 1]
        assert condition(model) == before
        one.check_integrity()
        monkeypatch.undo()
        while one.step():
            pass
        check_texts(model, rows, NAMES, [one.result(request_id) for request_id in ids])
        check_idle(one)


def test_aborts_in_the_middle(model):
    rows, before = prompts(LENGTHS), condition(model)
    with batcher(model, chunked_prefill_size=5) as one:
        ids = add(one, rows, NAMES)
        for index in (2, 0, 4):
            one.step()
            one.abort(ids[index])
            one.check_integrity()
        while one.step():
            pass
        outputs = [one.result(request_id) for request_id in ids]
        assert [output.finish_reason for output in outputs] == ["abort", "length"] * 2 + ["abort", "length"]
        kept = (1, 3, 5)
        check_texts(model, [rows[i] for i in kept], [NAMES[i] for i in kept], [outputs[i] for i in kept])
        assert condition(model) == before
        check_idle(one)


def test_wrong_names_are_refused_with_the_right_ones(model):
    with batcher(model) as one:
        for wrong in ("c", "", "X"):
            with pytest.raises(ValueError, match=f"adapter_name={wrong!r} is unknown, the model has 'x', 'y'"):
                one.add_request([5, 6], adapter_name=wrong)
        with pytest.raises(ValueError, match="adapter_name must be a string, got 3"):
            one.add_request([5, 6], adapter_name=3)
        check_idle(one)


def test_models_without_adapters_refuse_names():
    inside = wrapped().get_base_model()
    for one in (build("llama_gqa"), inside):
        with batcher(one) as running, pytest.raises(ValueError, match="LlamaForCausalLM has no PEFT adapters"):
            running.add_request([5, 6], adapter_name="x")


def test_an_adapter_that_goes_away_ends_its_requests_alone():
    model, rows = wrapped(), prompts((6, 8, 10))
    with batcher(model) as one:
        ids = add(one, rows, "xyx")
        one.step()
        one.step()
        model.delete_adapter("y")
        while one.step():
            pass
        outputs = [one.result(request_id) for request_id in ids]
        assert outputs[1].finish_reason == "error" and "'y' is unknown" in str(outputs[1].error)
        check_texts(model, [rows[0], rows[2]], "xx", [outputs[0], outputs[2]])
        check_idle(one)


def test_merged_adapters_are_refused_until_they_are_unmerged():
    model, row = wrapped(), prompts((6,))[0]
    right = text(model, "y", row)
    with batcher(model) as one:
        model.merge_adapter(["x"])
        with pytest.raises(ValueError, match="adapters are merged into the weights; unmerge them first"):
            one.add_request(row, adapter_name="y")
        merged = one.generate([row], greedy())[0]
        model.unmerge_adapter()
        request_id = one.add_request(row, generation_config=greedy(), adapter_name="y")
        assert list(one.result(request_id).output_token_ids) == right
        assert_same_text(model, row, list(merged.output_token_ids), text(model, "x", row))


def test_adapters_that_cannot_be_packed_are_refused():
    model = wrapped()
    model.add_adapter("later", lora(alora_invocation_tokens=[7, 8]))
    model.set_adapter("x")
    with batcher(model) as one:
        with pytest.raises(PackingError, match="activated LoRA"):
            one.add_request([5, 6], adapter_name="later")
        one.add_request([5, 6], generation_config=greedy(4), request_id="waits")
        model.set_adapter("later")
        with pytest.raises(PackingError, match="activated LoRA"):
            one.step()
        with pytest.raises(PackingError, match="activated LoRA"):
            ContinuousBatcher(model)
        model.set_adapter("x")
        assert one.result("waits").finish_reason == "length"
    virtual = get_peft_model(build("llama_gqa"), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(PackingError, match="PROMPT_TUNING"):
        ContinuousBatcher(virtual)


def test_an_adapter_is_tried_before_its_first_request(monkeypatch):
    model, rows, tried = wrapped(), prompts((6, 8)), []
    with batcher(model) as one:

        def refuse(model):
            tried.append(adapter_state(model))
            raise PackingError("it mixes sequences")

        monkeypatch.setattr("hf_paged.engine.packing_plan", refuse)
        before = condition(model)
        outputs = one.generate(rows, greedy(), adapter_name=["y", None])
        assert tried == [(("y",), False)] and condition(model) == before
        assert outputs[0].finish_reason == "error" and "it mixes sequences" in str(outputs[0].error)
        check_texts(model, [rows[1]], [None], [outputs[1]])
        monkeypatch.undo()
        check_texts(model, rows, ["y", None], one.generate(rows, greedy(), adapter_name=["y", None]))


def test_batchers_of_one_model_take_turns():
    model, rows = wrapped(), prompts((6, 9, 12))
    want = {name: [text(model, name, row) for row in rows] for name in ("x", "y", BASE)}
    start = threading.Barrier(3)

    def run(name):
        with batcher(model if name != "x" else model.get_base_model()) as one:
            start.wait(30)
            # The base model's batcher never names one: it has what is active, "x".
            outputs = one.generate(rows, greedy(), **({} if name == "x" else {"adapter_name": name}))
        return [list(output.output_token_ids) for output in outputs]

    results = in_threads(*(lambda name=name: run(name) for name in ("x", "y", BASE)))
    assert results == [want["x"], want["y"], want[BASE]]


def test_adapters_in_training_stay_trainable():
    model = wrapped().train()
    before = condition(model)
    assert any(before["gradients"].values()) and all(before["training"].values())
    row = prompts((8,))[0]
    with batcher(model) as one:
        outputs = one.generate([row, row], greedy(), adapter_name=["y", BASE])
        assert condition(model) == before
    model.eval()  # dropout is for training steps, and was off in the batcher
    check_texts(model, [row, row], ["y", BASE], outputs)


# A step, split


def test_the_parts_of_a_step_tell_where_their_logits_belong():
    names = ("x", "y", None, "x", "x", "y")
    running = [Request(str(key), range(4), key=key, max_tokens=9, adapter_name=name) for key, name in enumerate(names)]
    output = SchedulerOutput()
    output.num_decode, output.num_tokens = 3, 3 + 2 + 4 + 4
    running[3].wants_prompt_logits = True
    first, last, whole = Prefill(running[4], 0, 2), Prefill(running[5], 0, 4), Prefill(running[3], 0, 4)
    output.prefills = [first, whole, last]
    parts = {part.adapter_name: part for part in split(output, running)}
    assert list(parts) == [None, "x", "y"]
    assert parts[None].places == [2] and parts["x"].places == [0, 3, 4, 5, 6] and parts["y"].places == [1, 7]
    assert parts["x"].output.prefills == [first, whole] and parts["y"].output.prefills == [last]
    assert {name: part.output.decode_rows.tolist() for name, part in parts.items()} == {None: [2], "x": [0], "y": [1]}
    assert {name: part.output.num_tokens for name, part in parts.items()} == {None: 1, "x": 7, "y": 5}
    same = SchedulerOutput()
    same.num_decode = same.num_tokens = 1
    assert split(same, running)[0].output is same
