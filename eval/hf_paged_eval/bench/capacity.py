"""How many requests run at once in a fixed room for keys and values, and how much of the room is wasted.

Contract: five ways to use one budget of bytes, for the same requests. The budget is that of `slots` requests with the
workload's longest prompt and longest output reserved.

- static: that much is reserved for each running request; a slot goes to the next one when its request ends.
- padded: DynamicCache over batches in the order of arrival, each as large as fits until its end; rows that have ended
  stay, as generate keeps them.
- paged, paged + shared prefix, paged + fp8_e4m3: a ContinuousBatcher with as many blocks as the budget holds, run for
  real. An 8-bit block takes fewer bytes, the scales beside it included, so that the budget holds more of them.

The first two are replayed token by token from the forced lengths (a test holds the replays against the real caches).
Waste is the share of the held bytes that holds no token which a running request still needs: reserved and not reached,
padding, rows that have ended, the rest of a last block.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

import hf_paged

from .charts import Panel, svg
from .engines import Padded, batches, forced
from .setting import Bench, kv_bytes_per_token
from .workloads import Prompt, Workload

STATIC, PADDED, PAGED, SHARED = "static", "padded DynamicCache", "paged", "paged + shared prefix"
EIGHT_BITS = "fp8_e4m3"
QUANTIZED = f"paged + {EIGHT_BITS}"


class Moment(NamedTuple):
    """What is true after a step: requests that run, tokens that there is room for and that are stored (by their bytes,
    in tokens of the model's own dtype), and new tokens so far, over all requests."""

    running: int
    held: float
    stored: float
    produced: int

    @property
    def waste(self) -> float:
        return 1 - self.stored / self.held if self.held else 0.0


def run(
    bench: Bench, workloads: Sequence[str] = ("mixed", "shared_prefix"), slots: int | None = None, block_size: int = 16
) -> dict:
    """Measure all ways on some workloads.

    Args:
        bench: the model and its options.
        workloads: names of SPECS.
        slots: how many fully reserved requests the budget holds; None for 8 (2 in a quick run).
        block_size: of the paged ways.
    """
    slots = (2 if bench.setting.quick else 8) if slots is None else slots
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    per_token = kv_bytes_per_token(bench.model)
    rows = []
    for name in workloads:
        work = bench.workload(name)
        budget = slots * (work.longest_prompt + work.longest_output)
        ways = {STATIC: static(work.prompts, budget), PADDED: padded(work.prompts, budget)}
        for way in (PAGED, SHARED, QUANTIZED):
            bench.say(f"{name}: {way}")
            dtype = EIGHT_BITS if way == QUANTIZED else "auto"
            ways[way], preemptions = paged(bench, work, budget, block_size, way == SHARED, dtype)
            ways[way + " preemptions"] = preemptions
        entry = {**work.summary(), "budget_tokens": budget, "budget_mib": budget * per_token / 2**20, "ways": {}}
        for way in (STATIC, PADDED, PAGED, SHARED, QUANTIZED):
            entry["ways"][way] = {**summary(ways[way], budget), "preemptions": ways.get(way + " preemptions", 0)}
        if bench.device.type == "cuda":
            entry["allocator"] = allocator_overhead(bench, work)
        rows.append(entry)
    return {"kv_bytes_per_token": per_token, "slots": slots, "block_size": block_size, "workloads": rows}


def static(prompts: Sequence[Prompt], budget: int) -> list[Moment]:
    """The longest prompt and output reserved for each of as many requests as the budget of tokens holds."""
    room = max(len(one.token_ids) for one in prompts) + max(one.max_new_tokens for one in prompts)
    slots = min(len(prompts), budget // room)
    waiting, running, produced, moments = list(reversed(prompts)), [], 0, []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        for one in running:
            one[1] += 1
        produced += len(running)
        stored = sum(len(one.token_ids) + new - 1 for one, new in running)
        moments.append(Moment(len(running), slots * room, stored, produced))
        running = [[one, new] for one, new in running if new < one.max_new_tokens]
    return moments


def padded(prompts: Sequence[Prompt], budget: int) -> list[Moment]:
    """Batches of consecutive requests, each as large as fits: rows x (longest prompt + longest output - 1).

    The newest token of a request is stored with the next one.
    """
    moments, produced, start = [], 0, 0
    while start < len(prompts):
        batch = _largest_batch(prompts[start:], budget)
        start += len(batch)
        longest = max(len(one.token_ids) for one in batch)
        for new in range(1, max(one.max_new_tokens for one in batch) + 1):
            live = [one for one in batch if new <= one.max_new_tokens]
            produced += len(live)
            stored = sum(len(one.token_ids) + new - 1 for one in live)
            moments.append(Moment(len(live), len(batch) * (longest + new - 1), stored, produced))
    return moments


def _largest_batch(prompts: Sequence[Prompt], budget: int) -> Sequence[Prompt]:
    """As many of the first requests as fit when the last of them ends.

    Raises:
        ValueError: not even one fits.
    """
    longest = output = count = 0
    for one in prompts:
        longest, output = max(longest, len(one.token_ids)), max(output, one.max_new_tokens)
        if (count + 1) * (longest + output - 1) > budget:
            break
        count += 1
    if not count:
        raise ValueError(f"a budget of {budget} tokens does not hold one request of {prompts[0].total}")
    return prompts[:count]


def paged(
    bench: Bench, work: Workload, budget: int, block_size: int, share: bool, kv_cache_dtype: str = "auto"
) -> tuple[list[Moment], int]:
    """A real run over as many blocks as a budget of tokens of the model's own dtype holds.

    Returns:
        What it held after each step, and how often a request was preempted.
    """
    size = token_size(bench, kv_cache_dtype)
    num_blocks = int(budget / size) // block_size
    cache = {"block_size": block_size, "num_blocks": num_blocks, "enable_prefix_caching": share}
    cache["kv_cache_dtype"] = kv_cache_dtype
    scheduler = {"max_num_seqs": max(256, len(work.prompts))}
    moments, produced, done = [], 0, {}
    with hf_paged.ContinuousBatcher(bench.model, cache_config=cache, scheduler_config=scheduler) as batcher:
        for one in work.prompts:
            batcher.add_request(one.token_ids, generation_config=forced(one.max_new_tokens))
        while outputs := batcher.step():
            for output in outputs:
                # A preempted request computes its tokens again: they count once.
                produced += len(output.output_token_ids) - done.get(output.request_id, 0)
                done[output.request_id] = len(output.output_token_ids)
            stats = batcher.stats()
            held = stats.blocks_used * block_size * size
            ended = sum(output.finished for output in outputs)  # they ran in this step, their blocks are free now
            moments.append(Moment(stats.running + ended, held, held * (1 - stats.waste), produced))
        preemptions = batcher.stats().preemptions
    return moments, preemptions


def token_size(bench: Bench, kv_cache_dtype: str) -> float:
    """Bytes of a token's keys and values in this format, scales included, over those in the model's own dtype."""
    if kv_cache_dtype == "auto":
        return 1.0
    plans = hf_paged.memory_report(bench.model, seq_len=1, kv_cache_dtype=kv_cache_dtype).plans
    _, plain, quantized = (plan.bytes_per_token for plan in plans)
    return quantized / plain


def summary(moments: Sequence[Moment], budget: int) -> dict:
    """Figures over time. Until 80 % of the tokens are there, requests wait for room in every way: that is the mean."""
    total = moments[-1].produced
    busy = [moment for moment in moments if moment.produced <= 0.8 * total] or list(moments)
    return {
        "steps": len(moments),
        "running_mean": statistics.mean(moment.running for moment in busy),
        "running_most": max(moment.running for moment in moments),
        "held_mean": statistics.mean(moment.held for moment in busy) / budget,
        "waste_mean": statistics.mean(moment.waste for moment in busy),
        "waste_most": max(moment.waste for moment in busy),
        "over_time": [
            [round(100 * moment.produced / total, 2), moment.running, round(100 * moment.waste, 2)]
            for moment in thinned(moments)
        ],
    }


def thinned(moments: Sequence[Moment], most: int = 200) -> list[Moment]:
    """At most so many of them, evenly over the steps, the last one included."""
    step = max(1, -(-len(moments) // most))
    kept = list(moments[::step])
    return kept if kept[-1] is moments[-1] else [*kept, moments[-1]]


def allocator_overhead(bench: Bench, work: Workload) -> dict:
    """MiB that CUDA's allocator holds beyond what is in use, at most over the forwards of a run.

    DynamicCache makes larger tensors at each step and leaves the old ones in pieces; blocks stay where they are.
    """
    found = {}
    rows = batches(work.prompts, 16)
    for name in (PADDED, PAGED):
        most = 0

        def look(*_) -> None:
            nonlocal most
            beyond = torch.cuda.memory_reserved(bench.device) - torch.cuda.memory_allocated(bench.device)
            most = max(most, beyond)

        torch.cuda.empty_cache()
        hook = bench.model.register_forward_hook(look)
        try:
            if name == PADDED:
                for row in rows:
                    Padded(bench.model).generate([work.prompts[index] for index in row])
            else:
                with hf_paged.ContinuousBatcher(bench.model, scheduler_config={"cuda_graphs": False}) as batcher:
                    batcher.generate(
                        [one.token_ids for one in work.prompts], [forced(one.max_new_tokens) for one in work.prompts]
                    )
        finally:
            hook.remove()
        found[name] = most / 2**20
    return found


def report(bench: Bench, results: dict) -> None:
    for work in results["workloads"]:
        rows = [
            [
                way,
                f"{row['running_mean']:.1f}",
                row["running_most"],
                f"{100 * row['held_mean']:.1f} %",
                f"{100 * row['waste_mean']:.1f} %",
                f"{100 * row['waste_most']:.1f} %",
                row["steps"],
                row["preemptions"],
            ]
            for way, row in work["ways"].items()
        ]
        heads = [
            "KV cache",
            "at once, mean",
            "at once, most",
            "budget held, mean",
            "waste, mean",
            "waste, most",
            "steps",
            "preemptions",
        ]
        title = f"{work['name']}: {work['requests']} requests in {work['budget_mib']:.4g} MiB of KV "
        bench.table(title + f"({work['budget_tokens']:,} tokens)", heads, rows)
        for way, beyond in work.get("allocator", {}).items():
            bench.console.print(f"  {way}: CUDA's allocator held up to {beyond:.0f} MiB beyond what was in use")


def draw(record: dict) -> str:
    """Running requests and waste against the share of the tokens that is done."""
    panels = []
    for work in record["results"]["workloads"]:
        for column, title, label in (
            (1, "requests at once", "running requests"),
            (2, "waste", "waste (% of held KV bytes)"),
        ):
            lines = {way: [(at[0], at[column]) for at in row["over_time"]] for way, row in work["ways"].items()}
            panels.append(Panel(f"{work['name']}: {title}", "tokens generated (% of all)", label, lines))
    budgets = ", ".join(f"{work['name']} {work['budget_mib']:.4g} MiB" for work in record["results"]["workloads"])
    return svg(panels, f"Requests in a fixed KV budget ({budgets}), {record['setting']['model']}")
