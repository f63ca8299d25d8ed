"""Where the time of one `mixed` run goes: matrix products, attention, writing KV, other operators, Python, the rest.

Contract: the same requests are run twice. The first run is not disturbed: its times of scheduling, forward, sampling
and everything else (outputs, callbacks) are what the shares are of. In the second, every `every`-th step runs under
torch.profiler, which gives the time inside operators; attention and KV writes are hf_paged_kernels' operators, marked
for the while. Time inside operators of the profiled steps is held against the undisturbed forwards of the same steps;
what is left of a forward is Python and the dispatch of operators. The profiler makes operators look a little longer,
so the share of Python is a lower bound.

On a GPU operators are counted by their time on the device, and "Python and dispatch" is the time it waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import hf_paged
import hf_paged_kernels

from .charts import Panel, svg
from .engines import forced
from .machine import synchronize
from .setting import Bench
from .workloads import Workload

ATTENTION = ("paged_decode", "paged_prefill")
WRITES = ("reshape_and_cache", "copy_blocks")
MARK, FORWARD = "hf_paged_bench::", "forward"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_mm", "mkldnn_linear", "_scaled_mm")
PARTS = ("matrix products", "attention", "KV writes", "other operators", "Python and dispatch")
REST = ("sampling", "scheduling", "outputs and callbacks")


def run(bench: Bench, workload: str = "mixed", every: int | None = None) -> dict:
    """Profile one workload.

    Args:
        bench: the model and its options.
        workload: one of SPECS.
        every: which steps are profiled; None for every eighth (every second in a quick run).
    """
    work = bench.workload(workload)
    every = (2 if bench.setting.quick else 8) if every is None else every
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints two lines each time that it starts and stops
    _steps(bench, Workload(work.name, work.prompts[:2]))  # warms up
    bench.say("undisturbed run")
    plain = _steps(bench, work)
    bench.say("profiled run")
    profiled = _steps(bench, work, every)
    if [step["tokens"] for step in plain] != [step["tokens"] for step in profiled]:
        raise RuntimeError("two runs of the same requests made different steps; they cannot be compared")
    both = [(a, b["inside"]) for a, b in zip(plain, profiled, strict=True) if "inside" in b]
    forward = sum(a["forward"] for a, _ in both)
    inside = {part: sum(one[part] for _, one in both) / forward for part in PARTS[:4]}
    over = max(1.0, sum(inside.values()))  # where the profiler costs more than Python, operators are all of it
    total = {name: sum(step[name] for step in plain) for name in ("wall", "forward", "sample", "schedule")}
    shares = {part: share / over * total["forward"] / total["wall"] for part, share in inside.items()}
    shares[PARTS[4]] = total["forward"] / total["wall"] - sum(shares.values())
    shares["sampling"], shares["scheduling"] = total["sample"] / total["wall"], total["schedule"] / total["wall"]
    shares[REST[2]] = 1 - sum(shares.values())
    return {
        "workload": work.summary(),
        "steps": len(plain),
        "profiled_steps": len(both),
        "seconds": total["wall"],
        "tokens_per_second": work.new_tokens / total["wall"],
        "shares": shares,
        "seconds_of": {part: share * total["wall"] for part, share in shares.items()},
        "slower_under_profiler": sum(b["forward"] for b in profiled if "inside" in b) / forward,
    }


def _steps(bench: Bench, work: Workload, every: int = 0) -> list[dict]:
    """Run all requests; for each step `tokens`, seconds (`wall`, `forward`, `sample`, `schedule`), and for those that
    are profiled `inside`."""
    steps = []
    with hf_paged.ContinuousBatcher(bench.model) as batcher:
        for one in work.prompts:
            batcher.add_request(one.token_ids, generation_config=forced(one.max_new_tokens))
        before, outputs = batcher.stats(), [None]
        while True:
            watched = bool(every) and len(steps) % every == every // 2
            inside: dict[str, float] = {}
            with _watch(bench.model, bench.device, inside) if watched else contextlib.nullcontext():
                start = time.perf_counter()
                outputs = batcher.step()
                synchronize(bench.device)
                wall = time.perf_counter() - start
            if not outputs:
                return steps
            after = batcher.stats()
            step = {"wall": wall, "tokens": after.new_tokens + after.prompt_tokens}
            for name in ("forward", "sample", "schedule"):
                step[name] = getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")
            if watched:
                step["inside"] = inside
            steps.append(step)
            before = after


@contextlib.contextmanager
def _watch(model, device: torch.device, inside: dict[str, float]) -> Iterator[None]:
    """Fill `inside` with the seconds inside operators of the forward, by PARTS."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with _marked(model), profile(activities=activities) as profiler:
        yield
    inside.update(dict.fromkeys(PARTS[:4], 0.0))
    for event in profiler.events():
        # What runs on a GPU counts for the operator that launched it, and would count twice as an event of its own.
        if event.device_type == torch.autograd.DeviceType.CPU and (part := part_of(event)):
            inside[part] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6


def part_of(event) -> str | None:
    """Which of PARTS the time of an event itself belongs to; None for what is no operator or not of the forward."""
    if event.name == MARK + FORWARD:
        return None
    part = None
    name = event.name.removeprefix("aten::")
    above = event
    while above is not None and above.name != MARK + FORWARD:
        if above.name.startswith(MARK):
            part = "attention" if above.name.removeprefix(MARK) in ATTENTION else "KV writes"
        above = above.cpu_parent
    if above is None:
        return None
    return part or ("matrix products" if name in PRODUCTS else "other operators")


@contextlib.contextmanager
def _marked(model) -> Iterator[None]:
    """The forward, and the kernels' operators even where they go past the dispatcher, under names for the profiler."""
    before = {name: getattr(hf_paged_kernels, name) for name in (*ATTENTION, *WRITES)}

    def marked(name: str):
        def call(*arguments, **options):
            with record_function(MARK + name):
                return before[name](*arguments, **options)

        return call

    spans = []

    def enter(*_) -> None:
        spans.append(record_function(MARK + FORWARD))
        spans[-1].__enter__()

    with contextlib.ExitStack() as stack:
        for name, operator in before.items():
            stack.callback(setattr, hf_paged_kernels, name, operator)
            setattr(hf_paged_kernels, name, marked(name))
        stack.callback(model.register_forward_pre_hook(enter).remove)
        stack.callback(model.register_forward_hook(lambda *_: spans.pop().__exit__(None, None, None)).remove)
        yield


def report(bench: Bench, results: dict) -> None:
    rows = [
        [part, f"{100 * share:.1f} %", f"{results['seconds_of'][part]:.2f}"]
        for part, share in results["shares"].items()
    ]
    bench.table(
        f"{results['workload']['name']}: {results['steps']} steps in {results['seconds']:.1f} s, "
        f"{results['tokens_per_second']:.1f} tokens/s",
        ["part", "share", "seconds"],
        rows,
    )
    bench.console.print(
        f"  {results['profiled_steps']} steps under the profiler, {results['slower_under_profiler']:.2f} times as long"
    )


def draw(record: dict) -> str:
    shares = record["results"]["shares"]
    name = record["results"]["workload"]["name"]
    series = {part: [(name, 100 * share)] for part, share in shares.items()}
    panel = Panel("Share of the time of a run", "workload", "% of the run", series, bars=True)
    return svg([panel], f"Profile, {record['setting']['model']}, {record['setting']['dtype']}")
