"""What the benches stand on: workloads, plots, the machine's figures, replays of caches, fits and recommendations."""

import itertools
import subprocess
import sys
import time

import pytest
import torch
from bench_helpers import check_plot
from transformers import StaticCache

from hf_paged_eval.bench import capacity, charts, latency, machine, scaling, throughput
from hf_paged_eval.bench import profiling as profiling_bench
from hf_paged_eval.bench.block_size import recommend
from hf_paged_eval.bench.engines import Padded, batches, left_padded
from hf_paged_eval.bench.roofline import covered, products
from hf_paged_eval.bench.setting import Setting, kv_bytes_per_token, tiny_model
from hf_paged_eval.bench.steady import Steady
from hf_paged_eval.bench.workloads import QUICK_SPECS, SPECS, Prompt, english_ids, workload

# -- workloads -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(demo_model):
    return english_ids(demo_model[1])


def test_workloads_are_what_their_names_say(text):
    made = {name: workload(name, text) for name in SPECS}
    mixed = made["mixed"].prompts
    lengths, outputs = [len(one.token_ids) for one in mixed], [one.max_new_tokens for one in mixed]
    assert len(mixed) == 64 and min(lengths) >= 32 and max(lengths) <= 512
    assert min(outputs) >= 16 and max(outputs) <= 256
    assert max(outputs) > 3 * sum(outputs) / 64, "no heavy tail"
    assert len({one.token_ids[0] for one in mixed}) > 8 and len({tuple(one.token_ids[:16]) for one in mixed}) > 60
    shared = made["shared_prefix"].prompts
    assert len(shared) == 64 and {(len(one.token_ids), one.max_new_tokens) for one in shared} == {(544, 64)}
    assert len({tuple(one.token_ids[:512]) for one in shared}) == 1
    assert len({tuple(one.token_ids[512:]) for one in shared}) == 64
    for name, count, prompt, new in (("decode", 32, 32, 128), ("long", 4, 4096, 64)):
        assert [(len(one.token_ids), one.max_new_tokens) for one in made[name].prompts] == [(prompt, new)] * count


@pytest.mark.parametrize("name", SPECS)
def test_workloads_repeat_with_a_seed_and_are_real_text(name, text, demo_model):
    made = workload(name, text, seed=3)
    assert made == workload(name, text, seed=3) and made != workload(name, text, seed=4)
    small = workload(name, text, quick=True)
    assert len(small.prompts) == QUICK_SPECS[name].requests < len(made.prompts)
    assert small.prompt_tokens < made.prompt_tokens / 4
    written = demo_model[1].decode(text)
    for one in small.prompts:
        own = one.token_ids[QUICK_SPECS[name].prefix :]
        assert demo_model[1].decode(own[1:-1]) in written
    assert len(made.json_lines().splitlines()) == len(made.prompts)
    assert made.summary()["new_tokens"] == sum(one.max_new_tokens for one in made.prompts)


def test_wrong_workloads_are_named():
    with pytest.raises(ValueError, match="workload must be one of mixed, .* got 'nothing'"):
        workload("nothing", [1, 2, 3])
    with pytest.raises(ValueError, match="'long' needs a text of 16384 tokens, got 3"):
        workload("long", [1, 2, 3])
    with pytest.raises(ValueError, match="dtype must be one of .* got 'int8'"):
        Setting(dtype="int8")


# -- plots -----------------------------------------------------------------------------------------


def test_a_plot_shows_every_point_inside_its_axes():
    lines = {"a": [(1, 0.5), (16, 20), (256, 900)], "b": [(1, 1), (256, 3)]}
    bars = {f"engine {name}": [("mixed & long", 1234.5), ("decode", 7)] for name in range(6)}
    text = charts.svg(
        [
            charts.Panel("lines", "tokens", "ms", lines, log_x=True, log_y=True, dashed=frozenset({"b"})),
            charts.Panel("bars", "workload", "tokens / s", bars, bars=True),
            charts.Panel("one point", "x (s)", "y (%)", {"a": [(3, 0)]}),
        ],
        "A <title>",
    )
    words = check_plot(text, ["tokens", "ms", "workload", "tokens / s", "x (s)", "y (%)"], panels=3)
    assert {"A <title>", "mixed & long", "1,234", "a", "b", "engine 5"} <= set(words)
    assert [word for word in words if word in ("1", "16", "256")], "ticks of the points themselves"


@pytest.mark.parametrize("low, high", [(0, 7), (3, 3), (0.001, 0.0042), (-4, 90), (5, 12345)])
def test_ticks_are_round_and_lie_between(low, high):
    ticks = charts._ticks(low, high)
    assert 1 <= len(ticks) <= 8 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in ticks) or low == high


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="logarithmic axis cannot show 0"):
        charts.svg([charts.Panel("", "x", "y", {"a": [(1, 0)]}, log_y=True)], "")
    with pytest.raises(ValueError, match="a point in every series"):
        charts.svg([charts.Panel("", "x", "y", {"a": []})], "")
    assert [charts.number(value) for value in (0, 0.01234, 12.34, 1234.5, 2.5e6)] == [
        "0",
        "0.0123",
        "12.3",
        "1,234",
        "2.5M",
    ]


# -- the machine -----------------------------------------------------------------------------------


def test_a_process_that_we_started_is_none_of_the_others():
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    before = machine._own_seconds()
    child = subprocess.Popen([sys.executable, "-S", "-c", burn])
    while child.poll() is None:
        time.sleep(0.01)
    assert machine._own_seconds() - before > 0.35
    assert machine.others_warning(0.05, "now") is None
    assert "now other processes kept 1.5 of" in machine.others_warning(1.5, "now")


@pytest.mark.parametrize("kernel", [True, False])
def test_the_peak_is_seen_after_it_is_gone(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(machine, "_reset_peak", lambda pid: False)
    machine.trim()
    with machine.Peak(interval=0.001) as peak:
        held = torch.ones(32 * machine.MIB // 4)
        time.sleep(0.05)
        del held
    assert peak.how == "sampled" or kernel
    assert 30 * machine.MIB < peak.peak - peak.before < 80 * machine.MIB


def test_ways_run_in_turns_and_bandwidth_is_measured():
    order = []
    seconds = machine.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"] and {len(times) for times in seconds.values()} == {3}
    assert 1e8 < machine.copy_bandwidth(machine.MIB, rounds=3) < 1e13
    before = torch.get_num_threads()
    with machine.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# -- replays against real caches -------------------------------------------------------------------

MIXED = [Prompt(list(range(3, 3 + length)), new) for length, new in ((9, 4), (3, 7), (5, 2), (12, 3), (4, 1), (7, 6))]


@pytest.mark.parametrize("budget", [19, 36, 60, 200])
def test_the_padded_replay_is_what_generate_holds(budget):
    model = tiny_model(64)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    per_token, held = kv_bytes_per_token(model), []
    hook = model.register_forward_hook(
        lambda module, args, output: held.append(
            sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers) / per_token
        )
    )
    start, replay = 0, capacity.padded(MIXED, budget)
    while start < len(MIXED):
        batch = capacity._largest_batch(MIXED[start:], budget)
        Padded(model, len(batch)).generate(batch)
        start += len(batch)
    hook.remove()
    assert held == [moment.held for moment in replay] and max(held) <= budget
    assert replay[-1].produced == sum(one.max_new_tokens for one in MIXED)
    assert all(0 <= moment.waste < 1 for moment in replay)
    with pytest.raises(ValueError, match="a budget of 11 tokens does not hold one request of 13"):
        capacity.padded(MIXED, 11)


def test_the_static_replay_is_what_a_static_cache_takes():
    model = tiny_model(64)
    room, slots = 12 + 7, 3
    cache = StaticCache(model.config, max_cache_len=room)
    with torch.no_grad():
        model(torch.ones(slots, 4, dtype=torch.long), past_key_values=cache)
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / kv_bytes_per_token(model)
    replay = capacity.static(MIXED, slots * room + 5)
    assert {moment.held for moment in replay} == {taken}
    assert max(moment.running for moment in replay) == slots
    assert replay[-1].produced == sum(one.max_new_tokens for one in MIXED)
    # The first three end after 4, 7 and 2 steps, and others take their slots at once.
    assert [moment.running for moment in replay] == [3] * 5 + [2] * 2 + [1] * 4
    assert replay[0].stored == 9 + 3 + 5


def test_batches_keep_or_sort_the_order():
    assert batches(MIXED, 4) == [[0, 1, 2, 3], [4, 5]]
    assert batches(MIXED, 4, sort=True) == [[4, 2, 3, 0], [5, 1]]
    ids, mask = left_padded([[5, 6], [7]], 9, "cpu")
    assert ids.tolist() == [[5, 6], [9, 7]] and mask.tolist() == [[1, 1], [0, 1]]


# -- arithmetic ------------------------------------------------------------------------------------


def test_agreement_tells_how_far_and_how_close():
    model = tiny_model(64)
    prompts = [Prompt([3, 4, 5], 4), Prompt([6, 7], 4)]
    model.generation_config.eos_token_id = None
    right = Padded(model, 1).generate(prompts)
    assert throughput.agreement(model, prompts, right, right) == {"same_requests": 2, "same_share": 1.0, "gaps": []}
    wrong = [right[0], [*right[1][:1], (right[1][1] + 1) % 64, *right[1][2:]]]
    found = throughput.agreement(model, prompts, right, wrong)
    assert found["same_requests"] == 1 and found["same_share"] == 5 / 8 and found["gaps"][0] > 0
    with pytest.raises(RuntimeError, match=r"x gave outputs of \[3, 4\] tokens, asked for \[4, 4\]"):
        throughput.check_lengths("x", [right[0][:3], right[1]], prompts)


def test_fits_tell_a_line_from_a_square():
    x = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    line = scaling.fit(x, [5 + 0.25 * value for value in x])
    assert line["intercept"] == pytest.approx(5) and line["slope"] == pytest.approx(0.25)
    assert line["r2"] == pytest.approx(1) and abs(line["quadratic"]) < 1e-6
    square = scaling.fit(x, [5 + 0.001 * value**2 for value in x])
    assert square["quadratic"] == pytest.approx(0.001 * 256**2 / (5 + 0.001 * 256**2), rel=1e-3)


def test_small_memories_ask_for_little_waste_and_large_ones_for_speed():
    rows = [
        {"block_size": 1, "waste": 0.0, "step_ms": 20.0},
        {"block_size": 16, "waste": 0.05, "step_ms": 11.0},
        {"block_size": 128, "waste": 0.4, "step_ms": 10.0},
    ]
    found = recommend(rows, per_token=50_000, weights=2**29, tokens=200)
    assert [(row["memory_gib"], row["block_size"]) for row in found][0] == (1, 16)
    assert [row["block_size"] for row in found if row["memory_gib"] >= 8] == [128] * 4
    assert all(row["requests"] <= 256 for row in found) and found[0]["requests"] == 45
    assert recommend(rows, per_token=50_000, weights=5 * 2**30, tokens=200)[0]["memory_gib"] == 8


@pytest.mark.parametrize("share, want", [(1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentiles_are_ranks(share, want):
    assert latency.percentile(range(1, 101), share) == want
    assert latency.percentile([7.0], share) == 7.0


def test_times_of_a_request():
    one = latency.Served(Prompt([1], 3), arrival=2.0, is_long=False, tokens=[5.0, 5.5, 7.0])
    assert (one.ttft, one.completion, one.gaps) == (3.0, 5.0, [0.5, 1.5])
    assert latency.figures([one])["tbt_p99"] == 1.5


# -- steady decode, products -----------------------------------------------------------------------


def test_steady_decode_has_the_batch_and_the_context_that_were_asked_for():
    model = tiny_model(64)
    seen = []
    with Steady(model, 8, block_size=4) as steady:
        for batch, context in ((3, 16), (8, 40)):
            with steady.running(batch, context, 5):
                for _ in range(5):
                    outputs = steady.batcher.step()
                    assert len(outputs) == batch and not any(output.finished for output in outputs)
                seen.append([len(out.prompt_token_ids) + len(out.output_token_ids) - 1 for out in outputs])
            assert steady.batcher.stats().blocks_used == 0
        hits = steady.batcher.stats().prefix_hit_tokens
        with pytest.raises(ValueError, match="a context of 5 tokens has no room for 5 steps"):
            steady.running(1, 5, 5)
        prompts = [tuple(steady.prompt(row, 8)) for row in range(8)]
    assert seen == [[16] * 3, [40] * 8]
    assert hits > 3 * 8 and len(set(prompts)) == 8


def test_products_multiply_with_every_matrix_once():
    model = tiny_model(64)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, a, out, name=name: calls.append((name, out.shape[0])))
    products(model, 6, 2)()
    assert len(calls) == 2 * 7 + 1 and dict(calls)["lm_head"] == 2
    assert {rows for name, rows in calls if name != "lm_head"} == {6} and covered(model) == 1.0


def test_events_of_the_profiler_are_told_apart():
    class Event:
        def __init__(self, name, above=None):
            self.name, self.cpu_parent = name, above

    mark = profiling_bench.MARK
    forward = Event(mark + "forward", Event("something"))
    kernel = Event(mark + "paged_decode", forward)
    for event, part in (
        (forward, None),
        (Event("aten::mm"), None),
        (Event("aten::mm", forward), "matrix products"),
        (Event("aten::addmm", Event("aten::linear", forward)), "matrix products"),
        (Event("aten::mul", forward), "other operators"),
        (kernel, "attention"),
        (Event("aten::bmm", kernel), "attention"),
        (Event("aten::index_put_", Event(mark + "reshape_and_cache", forward)), "KV writes"),
    ):
        assert profiling_bench.part_of(event) == part, event.name


def test_thinned_keeps_the_ends():
    moments = [capacity.Moment(1, 1, 1, index) for index in range(1001)]
    kept = capacity.thinned(moments, 200)
    assert len(kept) <= 201 and kept[0] is moments[0] and kept[-1] is moments[-1]
    assert all(a.produced < b.produced for a, b in itertools.pairwise(kept))
