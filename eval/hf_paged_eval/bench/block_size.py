"""What the size of a block changes: waste, block tables, shared prefixes, the time of a step.

Contract: waste, tables and sharing are bookkeeping and do not depend on the weights, so they come from real runs of a
batcher over the real workloads with a model that costs next to nothing; step times are the model's own, in turns over
the sizes. The recommendation for a device's memory takes the size with the most tokens a second: as many requests of
`mixed` as fit beside the weights (at most `max_num_seqs`), over the time of a step relative to the fastest size.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

import hf_paged

from .charts import Panel, svg
from .engines import forced
from .machine import seconds_of
from .setting import Bench, kv_bytes_per_token, tiny_model
from .steady import Steady
from .workloads import Workload

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
QUICK_SIZES = (1, 16, 256)
MEMORIES_GIB = (1, 4, 8, 16, 24, 80)
MAX_NUM_SEQS = 256
KV_SHARE = 0.9  # of what the weights leave


def run(
    bench: Bench, sizes: Sequence[int] | None = None, batch: int | None = None, context: int = 384, steps: int = 24
) -> dict:
    """Measure all sizes.

    Args:
        bench: the model and its options.
        sizes: of blocks, in tokens.
        batch, context, steps: of the decode that is timed; None for a batch of 32 (4 in a quick run).
    """
    quick = bench.setting.quick
    sizes = list(sizes or (QUICK_SIZES if quick else SIZES))
    batch, (context, steps) = batch or (4 if quick else 32), (48, 4) if quick else (context, steps)
    books = tiny_model(bench.model.get_input_embeddings().num_embeddings, layers=1, hidden=16)
    mixed, shared = bench.workload("mixed"), bench.workload("shared_prefix")
    rows = []
    for size in sizes:
        bench.say(f"blocks of {size}: bookkeeping")
        rows.append({"block_size": size, **bookkeeping(books, mixed, size), **sharing(books, shared, size)})
    bench.say("step times")
    for row, seconds in zip(rows, step_times(bench, sizes, batch, context, steps), strict=True):
        row["step_ms"] = 1000 * statistics.median(seconds)
    per_token = kv_bytes_per_token(bench.model)
    weights = sum(parameter.nbytes for parameter in bench.model.parameters())
    advice = recommend(rows, per_token, weights, mixed.mean_tokens)
    return {"batch": batch, "context": context, "sizes": rows, "kv_bytes_per_token": per_token, "recommended": advice}


def bookkeeping(model, work: Workload, size: int) -> dict:
    """`waste` (mean over steps), and at most: `table_bytes` (int32 entries of all running requests), `blocks`."""
    waste, table, blocks = [], 0, 0
    lengths: dict[str, int] = {}
    with hf_paged.ContinuousBatcher(model, cache_config={"block_size": size}) as batcher:
        for one in work.prompts:
            batcher.add_request(one.token_ids, generation_config=forced(one.max_new_tokens))
        while outputs := batcher.step():
            for output in outputs:
                lengths[output.request_id] = len(output.prompt_token_ids) + len(output.output_token_ids)
                if output.finished:
                    del lengths[output.request_id]
            stats = batcher.stats()
            if lengths:
                waste.append(stats.waste)
            table = max(table, sum(4 * -(-length // size) for length in lengths.values()))
            blocks = max(blocks, stats.blocks_used)
    return {"waste": statistics.mean(waste), "table_bytes": table, "blocks": blocks}


def sharing(model, work: Workload, size: int) -> dict:
    """How much of the prompts was found in blocks: one request first, then all others at once."""
    with hf_paged.ContinuousBatcher(model, cache_config={"block_size": size}) as batcher:
        first, *others = work.prompts
        batcher.generate([first.token_ids], forced(first.max_new_tokens))
        batcher.generate([one.token_ids for one in others], forced(1))
        hits = batcher.stats().prefix_hit_tokens
    return {"hit_tokens": hits, "hit_share": hits / sum(len(one.token_ids) for one in others)}


def step_times(bench: Bench, sizes: Sequence[int], batch: int, context: int, steps: int) -> list[list[float]]:
    """Seconds of steps for each size: a step of every size, and again, so that all see the same machine."""
    with ExitStack() as stack:
        ways = [stack.enter_context(Steady(bench.model, batch, block_size=size)) for size in sizes]
        for steady in ways:
            stack.enter_context(steady.running(batch, context, steps + 1))
            steady.batcher.step()
        found: list[list[float]] = [[] for _ in sizes]
        for number in range(steps):
            for index in range(len(ways)):
                index = (index + number) % len(ways)
                found[index].append(seconds_of(ways[index].batcher.step, bench.device))
    return found


def recommend(rows: Sequence[dict], per_token: float, weights: int, tokens: float) -> list[dict]:
    """For each memory the block size with the most tokens a second.

    Args:
        rows: `block_size`, `waste` and `step_ms` of each size.
        per_token, weights: bytes of the KV of a token, and of the model.
        tokens: of a request, on average over its life.
    """
    fastest = min(row["step_ms"] for row in rows)
    found = []
    for memory in MEMORIES_GIB:
        room = KV_SHARE * (memory * 2**30 - weights)
        if room <= 0:
            continue

        def speed(row: dict, room: float = room) -> tuple[float, int]:
            fit = min(MAX_NUM_SEQS, room * (1 - row["waste"]) / (tokens * per_token))
            return round(fit / (row["step_ms"] / fastest), 6), row["block_size"]

        best = max(rows, key=speed)
        found.append(
            {
                "memory_gib": memory,
                "block_size": best["block_size"],
                "requests": int(speed(best)[0] * best["step_ms"] / fastest),
            }
        )
    return found


def report(bench: Bench, results: dict) -> None:
    rows = [
        [
            row["block_size"],
            f"{100 * row['waste']:.1f} %",
            f"{row['table_bytes']:,}",
            f"{100 * row['hit_share']:.1f} %",
            f"{row['step_ms']:.2f}",
        ]
        for row in results["sizes"]
    ]
    heads = ["block size", "waste (mixed)", "table bytes", "prompt found (shared_prefix)", "ms a step"]
    bench.table(f"block sizes; steps of {results['batch']} requests at {results['context']} tokens", heads, rows)
    for row in results["recommended"]:
        bench.console.print(
            f"  {row['memory_gib']} GiB: blocks of {row['block_size']} ({row['requests']} requests of `mixed` at once)"
        )


def draw(record: dict) -> str:
    rows = record["results"]["sizes"]

    def panel(title: str, label: str, value: str, factor: float = 1.0, log_y: bool = False) -> Panel:
        points = [(row["block_size"], factor * row[value]) for row in rows]
        return Panel(title, "block size (tokens)", label, {title: points}, log_x=True, log_y=log_y)

    panels = [
        panel("Waste, mixed", "waste (% of held slots)", "waste", 100),
        panel("Block tables, mixed", "bytes, all requests", "table_bytes", log_y=True),
        panel("Prompt found in blocks, shared_prefix", "% of prompt tokens", "hit_share", 100),
        panel("Decode step", "ms a step", "step_ms"),
    ]
    return svg(panels, f"Block size, {record['setting']['model']}, {record['setting']['dtype']}")
