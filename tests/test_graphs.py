"""Decoding steps replayed from graphs, with the device's part of it played by a tape of operators."""

import random
from types import SimpleNamespace

import pytest
import torch
from batcher_helpers import batcher, check, check_idle, expected, greedy, model_of, plain
from graph_tape import Again, TapeCapture
from tiny_models import assert_same_text, build, prompts

from hf_paged import SchedulerConfig, graphs, model_runner
from hf_paged.graphs import graph_sizes

NEW = 14


@pytest.fixture
def capture(monkeypatch):
    """Batchers capture their decoding steps; called, it sets how, and returns that."""

    def use(one=None):
        one = TapeCapture() if one is None else one
        monkeypatch.setattr(model_runner, "capture_for", lambda config, device: one)
        return one

    use()
    return use


@pytest.fixture
def warnings(monkeypatch):
    """What the module warns of."""
    said = []
    monkeypatch.setattr(graphs.logger, "warning", said.append)
    return said


def graphs_of(one):
    return one._engine.runner._graphs


def check_text(name, row, output, new):
    assert_same_text(model_of(name), row, list(output.output_token_ids), expected(name, row, new))


# Right text


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "gemma2", "qwen3", "gemma3n", "gpt_oss"])
def test_text_of_replayed_steps(name, capture, warnings):
    tape, rows = capture(), prompts((5, 17, 33, 12, 7))
    with batcher(name, max_num_seqs=5) as one:
        check(name, rows, one.generate(rows, greedy(2 * NEW)), 2 * NEW)
        stats = one.stats()
        assert not warnings
        # Each capture replays once for the comparison; those of tables that became wider come again.
        assert stats.graph_steps == tape.replays - graphs_of(one).num_captures >= NEW
        check_idle(one)


def test_rows_that_come_and_go(capture):
    """Sizes change from step to step, and each of them has its graph."""
    rows = prompts((5, 9, 7, 12, 8, 6, 11))
    with batcher("llama_gqa", max_num_seqs=6, cache_config={"block_size": 16}) as one:
        news = [8 + 7 * index for index in range(len(rows))]
        outputs = one.generate(rows, [greedy(new) for new in news])
        for row, new, output in zip(rows, news, outputs, strict=True):
            check_text("llama_gqa", row, output, new)
        assert graphs_of(one).num_captures >= 3  # of 6, 4, 2 and 1 rows
        assert one.stats().graph_steps > one.stats().steps / 2
        check_idle(one)


@pytest.mark.parametrize("seed", range(3))
def test_random_traces(capture, seed):
    """Few blocks, so that requests give way and come back; chunks of prompts between decoding steps; aborts."""
    rng = random.Random(seed)
    rows = prompts([rng.randint(1, 20) for _ in range(10)], seed=seed)
    settings = dict(max_num_seqs=4, max_num_batched_tokens=12, cache_config={"num_blocks": 16})
    with batcher("mistral_swa", **settings) as one:
        pending, names, aborted = list(enumerate(rows)), {}, set()
        while pending or one.has_work:
            if pending and rng.random() < 0.3:
                index, row = pending.pop()
                names[index] = one.add_request(row, generation_config=greedy(NEW + index))
            if names and rng.random() < 0.02:
                gone = rng.choice(sorted(names))
                if one.abort(names[gone]):
                    aborted.add(gone)
            one.step()
        assert one.stats().graph_steps > 0
        for index, row in enumerate(rows):
            if index not in aborted:
                check_text("mistral_swa", row, one.result(names[index]), NEW + index)
        check_idle(one)


def test_more_rows_than_the_largest_size_are_not_replayed(capture):
    rows = prompts((5, 9, 7))
    config = {"max_num_seqs": 3, "cuda_graph_sizes": [2]}
    with batcher("llama_gqa", max_num_seqs=3) as one:
        one._engine.runner._graphs.__init__(
            one.model,
            one._engine.runner._decode,
            one._engine.runner.pools,
            torch.device("cpu"),
            graph_sizes(SchedulerConfig(**config)),
            TapeCapture(),
        )
        outputs = one.generate(rows, [greedy(NEW), greedy(NEW), greedy(2 * NEW)])
        for row, new, output in zip(rows, (NEW, NEW, 2 * NEW), outputs, strict=True):
            check_text("llama_gqa", row, output, new)
        assert graphs_of(one).num_captures and one.stats().graph_steps < NEW


# A replay depends on the static buffers alone


def test_a_replay_reads_the_static_buffers_alone(capture):
    """While a graph is replayed, the step's own tensors hold something else."""
    batches = []

    def around(replay):
        arrays = [batches[-1].last_token, batches[-1].num_computed, batches[-1].seq_lens]
        arrays += [*batches[-1].slots, *batches[-1].block_tables]
        before = [array.copy() for array in arrays]
        for array in arrays:
            array[:] = -7
        replay()
        for array, values in zip(arrays, before, strict=True):
            array[:] = values

    capture(TapeCapture(around))
    rows = prompts((5, 17, 12))
    with batcher("gemma2", max_num_seqs=4) as one:
        batches.append(one._engine.scheduler.batch)
        check("gemma2", rows, one.generate(rows, greedy(2 * NEW)), 2 * NEW)
        assert one.stats().graph_steps > NEW / 2


def test_padding_writes_nothing(capture):
    """A step writes the slots of its own rows and no other: not those of a row that has ended, nor of block 0."""
    rows = prompts((5, 9, 7, 6))
    with batcher("llama_gqa", max_num_seqs=4) as one:
        runner, replayed = one._engine.runner, set()
        own, storages = runner.forward, list(runner.pools.storages())
        for storage in storages:
            storage.fill_(77.0)

        def forward(step):
            count = runner.graph_steps
            before = [storage.clone() for storage in storages]
            logits = own(step)
            for storage, old in zip(storages, before, strict=True):
                written = (storage != old).any(dim=3).any(dim=1).flatten().nonzero()[:, 0].tolist()
                assert sorted(step.groups[0].slot_mapping.tolist()) == written
            replayed.update({step.num_decode} if runner.graph_steps > count else ())
            return logits

        runner.forward = forward
        one.generate(rows, [greedy(new) for new in (40, 14, 40, 20)])
        assert replayed == {2, 3, 4}  # three rows take the graph of four


def test_kept_logits_are_not_overwritten(capture):
    rows, kept = prompts((5, 9)), []
    with batcher("llama_gqa", max_num_seqs=2) as one:
        own = one._engine.runner.forward

        def forward(step):
            logits = own(step)
            kept.append((logits, logits.clone()))
            return logits

        one._engine.runner.forward = forward
        one.generate(rows, greedy(NEW))
        assert one.stats().graph_steps > 3
    assert all(torch.equal(logits, then) for logits, then in kept)


def test_the_bound_of_the_lengths_is_that_of_the_tables(capture):
    """The longest row of the step that was captured is not the longest of those that are replayed."""
    (row,) = prompts((5,))
    with batcher("llama_gqa", max_num_seqs=1) as one:
        one.add_request(row, generation_config=greedy(20))
        for _ in range(8):
            one.step()
        runner = one._engine.runner
        step = runner.prepare(one._engine.scheduler.schedule())
        static = graphs_of(one)._buffers.step(step, 1)
        assert step.groups[0].max_decode_len < static.groups[0].max_decode_len == 8 * 4


# What moves, comes or goes


def test_a_pool_that_grows_is_captured_again(capture):
    rows = prompts((5, 9))
    with batcher("llama_gqa", max_num_seqs=2, cache_config={"num_blocks": None}) as one:
        check("llama_gqa", rows, one.generate(rows, greedy(70)), 70)
        runner = graphs_of(one)
        assert runner.num_captures > 2
        assert one.stats().graph_steps > 3 * runner.num_captures * graphs.STEPS_BEFORE_CAPTURE / 2
        check_idle(one)


def test_wider_tables_are_captured_again(capture):
    (row,) = prompts((5,))
    with batcher("llama_gqa", max_num_seqs=1) as one:
        check("llama_gqa", [row], one.generate([row], greedy(60)), 60)  # 8 columns of 4 tokens, then 16
        assert graphs_of(one).num_captures == 2


def stepping(one, count):
    for _ in range(count):
        one.step()


def test_changed_weights(capture):
    """In place they are seen; in other memory they are found out, and captured again."""
    model = build("llama_gqa")
    (row,) = prompts((5,))
    with batcher(model, max_num_seqs=1, cache_config={"block_size": 64}) as one, torch.no_grad():
        one.add_request(row, generation_config=greedy(100))
        stepping(one, 10)
        assert graphs_of(one).num_captures == 1
        before = one.stats().graph_steps
        model.lm_head.weight.neg_()
        found = one.step()[0].new_token_ids[0]
        assert one.stats().graph_steps == before + 1
        history = row + list(one._engine.scheduler.batch.requests[0].output_token_ids)[:-1]
        assert found == int(model(torch.tensor([history])).logits[0, -1].argmax())
        old = model.lm_head.weight.data
        model.lm_head.weight.data = -old
        old.fill_(float("nan"))
        found = one.step()[0].new_token_ids[0]
        assert one.stats().graph_steps == before + 1
        history = row + list(one._engine.scheduler.batch.requests[0].output_token_ids)[:-1]
        assert found == int(model(torch.tensor([history])).logits[0, -1].argmax())
        stepping(one, 5)
        assert graphs_of(one).num_captures == 2 and one.stats().graph_steps > before + 1


def test_a_hook_that_comes_sees_every_forward(capture, warnings):
    model, calls = build("llama_gqa"), []
    (row,) = prompts((5,))
    with batcher(model, max_num_seqs=1, cache_config={"block_size": 64}) as one:
        one.add_request(row, generation_config=greedy(100))
        stepping(one, 10)
        assert one.stats().graph_steps > 3
        hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        stepping(one, 10)
        assert len(calls) == 10
        hook.remove()
        assert "a hook must see every forward" in warnings[0] and len(warnings) == 1


def test_a_module_that_was_replaced(capture):
    model = build("llama_gqa")
    first, second = prompts((5, 9))
    with batcher(model, max_num_seqs=1, cache_config={"block_size": 64}) as one:
        one.generate([first], greedy(NEW))
        assert one.stats().graph_steps
        torch.manual_seed(3)
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
        (output,) = one.generate([second], greedy(NEW))
        ids = torch.tensor([second])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy(NEW))[0, len(second) :].tolist()
        assert list(output.output_token_ids) == want


# What cannot be captured runs as it is, after one line


class Refusing(TapeCapture):
    def record(self, function):
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be ...")


class Forgetting(TapeCapture):
    """Its replays do nothing."""

    def record(self, function):
        super().record(function)
        return lambda: None


class Exchanging(TapeCapture):
    """Its replays give each row the logits of another one."""

    runner = None

    def record(self, function):
        def replay():
            function()
            logits = self.runner._buffers.logits
            logits.copy_(logits.roll(1, dims=0))

        return replay


@pytest.mark.parametrize(
    "name, way, reason",
    [
        ("llama_gqa", Refusing, "operation not permitted when stream is capturing"),
        ("llama_gqa", Forgetting, "other logits than the step (difference nan"),
        ("llama_gqa", Exchanging, "other logits than the step"),
        ("deepseek_v3", TapeCapture, "it gathers keys and values"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is(name, way, reason, capture, warnings):
    way, rows = capture(way()), prompts((5, 17, 12))
    with batcher(name, max_num_seqs=3) as one:
        way.runner = graphs_of(one)
        check(name, rows, one.generate(rows, greedy(NEW)), NEW)
        assert one.stats().graph_steps == 0 and len(warnings) == 1
        assert reason in warnings[0] and "\n" not in warnings[0] and "without CUDA graphs" in warnings[0]
        assert graphs_of(one)._buffers is None
        check_idle(one)


@pytest.mark.parametrize("what", ["item", "mask", "nonzero"])
def test_a_model_that_looks_at_values_is_not_captured(what, capture, warnings):
    model = build("llama_gqa")
    own = model.model.norm.forward

    def forward(hidden):
        if what == "item":
            hidden = hidden * (1.0 if hidden.sum().item() < 1e9 else 2.0)
        elif what == "mask":
            hidden = torch.zeros_like(hidden).index_put((hidden == hidden,), hidden[hidden == hidden])
        else:
            hidden = hidden[:, torch.ones(hidden.shape[1]).nonzero()[:, 0]]
        return own(hidden)

    model.model.norm.forward = forward
    (row,) = prompts((9,))
    with batcher(model, max_num_seqs=1) as one:
        (output,) = one.generate([row], greedy(NEW))
        assert_same_text(model, row, list(output.output_token_ids), expected("llama_gqa", row, NEW))
        assert len(warnings) == 1 and "looks at values on the host" in warnings[0]


def test_layers_on_several_devices_are_not_captured():
    pools = SimpleNamespace(devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    runner = graphs.GraphRunner(None, None, pools, torch.device("cuda", 0), (1, 2), None)
    assert runner.refusal == "its layers lie on cuda:0, cuda:1"
    assert runner.run(SimpleNamespace(num_decode=1, chunks=[])) is None


def test_an_interrupted_capture_leaves_everything_usable(capture, warnings):
    class Interrupted(TapeCapture):
        times = 2

        def record(self, function):
            self.times -= 1
            if self.times >= 0:
                raise KeyboardInterrupt
            return super().record(function)

    capture(Interrupted())
    rows = prompts((5, 9))
    with batcher("llama_gqa", max_num_seqs=2, cache_config={"block_size": 16}) as one:
        names = [one.add_request(row, generation_config=greedy(2 * NEW)) for row in rows]
        interrupts = 0
        while one.has_work:
            try:
                one.step()
            except KeyboardInterrupt:
                interrupts += 1
        for row, name in zip(rows, names, strict=True):
            check_text("llama_gqa", row, one.result(name), 2 * NEW)
        assert interrupts == 2 and one.stats().graph_steps > NEW / 2 and not warnings
        check_idle(one)


def test_a_compiled_forward_is_what_is_captured(capture, warnings):
    capture(Again())
    model, rows = build("llama_gqa", num_hidden_layers=1), prompts((5, 17, 12))
    with batcher(model, max_num_seqs=3, compile="eager") as one:
        for row, output in zip(rows, one.generate(rows, greedy(2 * NEW)), strict=True):
            assert_same_text(model, row, list(output.output_token_ids), plain(model, row, **greedy(2 * NEW)))
        stats = one.stats()
        assert stats.graph_steps > NEW and stats.compiled_steps > stats.graph_steps and not warnings
