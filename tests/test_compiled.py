"""Decoding steps through torch.compile: the right text, two graphs a model, and who is refused."""

import gc
import random
import weakref

import pytest
import torch
from batcher_helpers import batcher, check, check_idle, greedy, in_threads, plain
from tiny_models import assert_same_text, build, prompts
from torch._dynamo.utils import counters

import hf_paged
from hf_paged import compiled, model_runner

NEW = 12


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def counted():
    counters.clear()
    yield
    counters.clear()


@pytest.fixture(scope="module")
def one_layer():
    """A model for tests that leave it as it was: what was compiled for it stays."""
    return build("llama_gqa", num_hidden_layers=1)


MODELS = {
    "llama_gqa": ("aot_eager", {"num_hidden_layers": 1}),
    "gpt2": ("eager", {"n_layer": 2}),
    "gemma2": ("eager", {"num_hidden_layers": 2}),  # a window and softcap, then full
    "qwen3": ("eager", {"num_hidden_layers": 1}),
    "gpt_oss": ("eager", {"num_hidden_layers": 1}),  # sinks and experts
    "gemma3n": (  # the last layer reads the pages of the one before it
        "eager",
        {
            "num_hidden_layers": 3,
            "intermediate_size": [96] * 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "activation_sparsity_pattern": [0.0] * 3,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_text_without_compiling_again(name):
    """One graph of one row and one of any number; requests come and go, the pool grows, tables become wider."""
    backend, changes = MODELS[name]
    model, rows = build(name, **changes), prompts((5, 17, 33, 12, 9, 1))
    news = [6 + 5 * index for index in range(len(rows))]
    want = [plain(model, row, **greedy(new)) for row, new in zip(rows, news, strict=True)]
    for config in ({"num_blocks": None}, {"num_blocks": 24}):
        with batcher(model, max_num_seqs=5, max_num_batched_tokens=40, cache_config=config, compile=backend) as one:
            assert num_graphs() == 2  # also the second time
            outputs = one.generate(rows, [greedy(new) for new in news])
            for row, right, output in zip(rows, want, outputs, strict=True):
                assert_same_text(model, row, list(output.output_token_ids), right)
            stats = one.stats()
            assert stats.compiled_steps > 20 and stats.graph_steps == 0
            assert num_graphs() == 2 and not counters["graph_break"] and not counters["recompiles"]
            check_idle(one)


def test_inductor():
    """The default backend, a C++ compiler included."""
    model = build("llama_gqa", num_hidden_layers=1)
    rows = prompts((5, 17, 12))
    with batcher(model, max_num_seqs=3, compile=True) as one:
        graphs = num_graphs()
        outputs = one.generate(rows, [greedy(NEW), greedy(2 * NEW), greedy(3 * NEW)])
        for row, new, output in zip(rows, (NEW, 2 * NEW, 3 * NEW), outputs, strict=True):
            assert_same_text(model, row, list(output.output_token_ids), plain(model, row, **greedy(new)))
        assert one.stats().compiled_steps > 2 * NEW and num_graphs() == graphs == 2


def test_random_trace():
    """Few blocks, so that requests give way and come back; more decoding rows than a step takes; aborts; samples."""
    rng = random.Random(0)
    model, rows = build("mistral_swa", num_hidden_layers=1), prompts([rng.randint(1, 20) for _ in range(10)])
    settings = dict(max_num_seqs=6, max_num_batched_tokens=4, cache_config={"num_blocks": 18})
    with batcher(model, compile="eager", **settings) as one:
        pending, names, aborted = list(enumerate(rows)), {}, set()
        while pending or one.has_work:
            if pending and rng.random() < 0.3:
                index, row = pending.pop()
                names[index] = one.add_request(row, generation_config=greedy(NEW + index))
            if names and rng.random() < 0.02 and one.abort(names[gone := rng.choice(sorted(names))]):
                aborted.add(gone)
            one.step()
        assert one.stats().compiled_steps and num_graphs() <= 2
        for index, row in enumerate(rows):
            if index not in aborted:
                right = plain(model, row, **greedy(NEW + index))
                assert_same_text(model, row, list(one.result(names[index]).output_token_ids), right)
        check_idle(one)


def test_two_batchers_of_one_model_at_once(one_layer):
    model, rows = one_layer, prompts((5, 17, 12, 9))
    want = [plain(model, row, **greedy(3 * NEW)) for row in rows]
    settings = {"compile": "eager", "cache_config": {"num_blocks": 80}}
    with batcher(model, max_num_seqs=4, **settings) as one, batcher(model, max_num_seqs=2, **settings) as other:
        graphs = num_graphs()
        for outputs in in_threads(*(lambda b=b: b.generate(rows, greedy(3 * NEW)) for b in (one, other))):
            for row, right, output in zip(rows, want, outputs, strict=True):
                assert_same_text(model, row, list(output.output_token_ids), right)
        assert one.stats().compiled_steps and other.stats().compiled_steps and num_graphs() == graphs


def test_steps_run_as_they_are_while_another_thread_compiles(monkeypatch):
    rows = prompts((5, 17))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as torch does, for the whole process
    with batcher("llama_gqa") as one:
        check("llama_gqa", rows, one.generate(rows, greedy()))


def test_nothing_keeps_the_pools_or_the_model():
    model = build("llama_gqa", num_hidden_layers=1)
    with batcher(model, max_num_seqs=2, compile="eager") as one:
        one.generate(prompts((5, 7)), greedy(NEW))
        assert one.stats().compiled_steps
        storages = [weakref.ref(storage) for storage in one._engine.runner.pools.storages()]
    gc.collect()
    assert not any(storage() is not None for storage in storages)
    model = weakref.ref(model)
    del one
    gc.collect()
    assert model() is None


# Who is refused


@pytest.mark.parametrize("name", ["deepseek_v3", "jetmoe", "diffllama"])
def test_gathered_keys_and_values_are_refused(name):
    with pytest.raises(hf_paged.PackingError, match=r"compile=True: attention of \w+ runs over gathered keys"):
        batcher(name, compile=True)
    with pytest.raises(hf_paged.PackingError, match="compile=True: attention of"):  # the reason is kept
        batcher(name, compile=True)


def wrapped(module, around):
    """A model's module with its forward changed."""
    own = module.forward
    module.forward = lambda *args, **kwargs: around(own, *args, **kwargs)


def test_what_dynamo_cannot_trace_whole_is_refused():
    model = build("llama_gqa", num_hidden_layers=1)

    def around(own, hidden):
        return own(hidden * (1.0 if hidden.sum().item() < 1e9 else 2.0))

    wrapped(model.model.norm, around)
    with pytest.raises(hf_paged.PackingError, match="compile=True: torch.compile cannot trace .* LlamaForCausalLM"):
        batcher(model, compile="eager")
    with batcher(model) as one:
        one.generate(prompts((5,)), greedy(3))


def test_keys_that_are_computed_with_are_refused(monkeypatch):
    """A model whose attention reads its keys once more: in a trace there are none, and nothing pretends so."""
    model = build("llama_gqa", num_hidden_layers=1)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["hf_paged"]

    def attention(module, query, key, value, *args, **kwargs):
        return own(module, query + 0 * key.mean(), key, value, *args, **kwargs)

    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "hf_paged", attention)
    with pytest.raises(hf_paged.PackingError, match="PagedKV.* has no attribute"):
        batcher(model, compile="eager")


def test_other_logits_are_refused():
    model = build("llama_gqa", num_hidden_layers=1)

    def around(own, hidden):
        return own(hidden * 2) if not torch.compiler.is_compiling() else own(hidden.flip(1))

    wrapped(model.lm_head, around)
    with pytest.raises(hf_paged.PackingError, match="gives other logits compiled than not"):
        batcher(model, compile="eager")


def test_a_write_that_is_lost_is_refused(monkeypatch):
    """The compiled side of the trial reads what it wrote itself."""
    from hf_paged.traced_cache import TracedLayer

    own = TracedLayer.update

    def update(self, key_states, value_states, *args, **kwargs):
        return own(self, key_states, value_states * (0 if self.layer_idx == 1 else 1))

    monkeypatch.setattr(TracedLayer, "update", update)
    with pytest.raises(hf_paged.PackingError, match="gives other logits compiled than not"):
        batcher(build("llama_gqa", num_hidden_layers=2), compile="eager")


def test_a_wrong_window_is_refused(monkeypatch):
    own = compiled._windows
    monkeypatch.setattr(compiled, "_windows", lambda *args: {layer: window - 1 for layer, window in own(*args).items()})
    with pytest.raises(hf_paged.PackingError, match="gives other logits compiled than not"):
        batcher(build("mistral_swa", num_hidden_layers=1), compile="eager")


def test_hooks_and_adapters_are_refused():
    model = build("llama_gqa", num_hidden_layers=1)
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(hf_paged.PackingError, match="compile=True: a hook must see every forward"):
        batcher(model, compile="eager")
    hook.remove()
    model.model.norm._disable_adapters = False
    with pytest.raises(hf_paged.PackingError, match="compile=True: adapters in model.norm may be switched"):
        batcher(model, compile="inductor")


def test_a_backend_that_fails_is_no_fault_of_the_model(monkeypatch):
    def broken(module, inputs):
        raise OSError("no compiler is here")

    torch._dynamo.register_backend(broken, name="broken_one")
    try:
        for _ in range(2):  # nothing is kept of it
            with pytest.raises(RuntimeError, match="the backend 'broken_one' of torch.compile failed.*no compiler"):
                batcher(build("llama_gqa", num_hidden_layers=1), compile="broken_one")
    finally:
        torch._dynamo.backends.registry._BACKENDS.pop("broken_one", None)


@pytest.mark.parametrize("value", ["nonsense", 1, {"backend": "inductor"}])
def test_settings(value):
    with pytest.raises(ValueError, match="compile must be True, False or a backend of torch.compile"):
        batcher(compile=value)


# Afterwards


def stepping(one, count):
    for _ in range(count):
        one.step()


def test_a_hook_that_comes_later_sees_every_forward(one_layer):
    model, calls = one_layer, []
    (row,) = prompts((5,))
    with batcher(model, max_num_seqs=1, compile="eager") as one:
        one.add_request(row, generation_config=greedy(40))
        stepping(one, 5)
        before = one.stats().compiled_steps
        assert before == 4
        hook = model.model.norm.register_forward_hook(lambda *_: calls.append(1))
        stepping(one, 3)
        assert len(calls) == 3 and one.stats().compiled_steps == before
        hook.remove()
        stepping(one, 3)
        assert len(calls) == 3 and one.stats().compiled_steps == before + 3


def test_weights_that_change_are_seen(one_layer):
    model = one_layer
    (row,) = prompts((5,))
    with batcher(model, max_num_seqs=1, compile="eager") as one, torch.no_grad():
        one.add_request(row, generation_config=greedy(40))
        stepping(one, 5)
        # Twice the sign: afterwards the weights are what they were.
        for change in (model.lm_head.weight.neg_, lambda: setattr(model.lm_head.weight, "data", -model.lm_head.weight)):
            change()
            found = one.step()[0].new_token_ids[0]
            history = row + list(one._engine.scheduler.batch.requests[0].output_token_ids)[:-1]
            assert found == int(model(torch.tensor([history])).logits[0, -1].argmax())
        assert one.stats().compiled_steps == 6


def test_a_model_that_cannot_be_traced_any_more_runs_as_it_is(monkeypatch):
    said = []
    monkeypatch.setattr(model_runner.logger, "warning", said.append)
    model = build("llama_gqa", num_hidden_layers=1)
    rows = prompts((5, 9))
    want = [plain(model, row, **greedy(2 * NEW)) for row in rows]
    with batcher(model, max_num_seqs=2, compile="eager") as one:
        names = [one.add_request(row, generation_config=greedy(2 * NEW)) for row in rows]
        stepping(one, 6)
        wrapped(model.model.norm, lambda own, hidden: own(hidden * (1.0 if hidden.sum().item() < 1e9 else 2.0)))
        outputs = [one.result(name) for name in names]
        for row, output, right in zip(rows, outputs, want, strict=True):
            assert_same_text(model, row, list(output.output_token_ids), right)
        assert one.stats().compiled_steps == 5 and len(said) == 1 and "cannot be compiled any more" in said[0]
        check_idle(one)
