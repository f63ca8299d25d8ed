"""Which part of the floor a step reaches: its matrix products alone, and its keys and values at memory speed.

Contract: the floor of a step is the time of the model's own matrix products, run alone over its own weights at the same
number of tokens and dtype, one after the other as a forward does, and the time to move the bytes of KV that the step
attends to at the bandwidth of a large copy (read and written bytes together). Steps, products and copies are timed in
turns. Nothing else is in the floor: no norms, no activations, no sampling, no scheduling.

The products are those of nn.Linear and Conv1D modules; `weights_covered` is their share of the model's weights in
matrices, tables of embeddings left out (experts that are held as one tensor are not covered, for example).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from transformers.pytorch_utils import Conv1D

from .charts import Panel, svg
from .engines import forced
from .machine import copy_bandwidth, in_turns
from .setting import Bench, kv_bytes_per_token
from .steady import Steady

BATCHES = (1, 8, 32, 64)
QUICK_BATCHES = (1, 4)


def run(
    bench: Bench,
    batches: Sequence[int] | None = None,
    context: int = 256,
    prefill: int = 512,
    rounds: int | None = None,
    compile: bool = False,
) -> dict:
    """Time steps of decode at some batches, and a prefill, against their floors.

    Args:
        bench: the model and its options.
        batches, context: of the decode steps.
        prefill: tokens of a prompt that one step computes.
        rounds: of each measurement; None for 15 (3 in a quick run).
        compile: as ContinuousBatcher takes it.
    """
    quick = bench.setting.quick
    batches = sorted(set(batches or (QUICK_BATCHES if quick else BATCHES)))
    rounds = (3 if quick else 15) if rounds is None else rounds
    context, prefill = (48, 32) if quick else (context, prefill)
    copy = copy_bandwidth((4 if quick else 256) * 2**20, bench.device)
    per_token = kv_bytes_per_token(bench.model)
    points = []
    with Steady(bench.model, max(batches), compile) as steady:
        for batch in batches:
            bench.say(f"decode: {batch} requests at {context} tokens")
            with steady.running(batch, context, rounds + 1):
                ways = {"step": steady.batcher.step, "products": products(bench.model, batch, batch)}
                seconds = in_turns(ways, rounds, bench.device)
            points.append(point(f"decode {batch}", batch, seconds, batch * context * per_token / copy))
    bench.say(f"prefill: {prefill} tokens")
    points.append(
        point(f"prefill {prefill}", prefill, prefill_times(bench, prefill, rounds), prefill * per_token / copy)
    )
    return {
        "context": context,
        "copy_gb_per_second": copy / 1e9,
        "weights_covered": covered(bench.model),
        "points": points,
    }


def prefill_times(bench: Bench, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step that computes one whole prompt, and of its products (of one row for the last of them)."""
    with Steady(bench.model, 1, enable_prefix_caching=False) as steady:
        prompt = steady.prompt(0, length)

        def step() -> None:
            steady.batcher.add_request(prompt, generation_config=forced(1))
            steady.batcher.step()

        return in_turns({"step": step, "products": products(bench.model, length, 1)}, rounds, bench.device)


def point(name: str, tokens: int, seconds: dict[str, list[float]], kv: float) -> dict:
    """Milliseconds of one case and the share of the floor in its step, the median over rounds."""
    shares = [(alone + kv) / step for step, alone in zip(seconds["step"], seconds["products"], strict=True)]
    return {
        "case": name,
        "tokens": tokens,
        "step_ms": 1000 * statistics.median(seconds["step"]),
        "products_ms": 1000 * statistics.median(seconds["products"]),
        "kv_ms": 1000 * kv,
        "reached": statistics.median(shares),
    }


def matrices(model) -> list[tuple[torch.nn.Module, bool]]:
    """The modules that are matrix products, with whether each gives the logits."""
    head = model.get_output_embeddings()
    return [(module, module is head) for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D)]


def covered(model) -> float:
    """Share of the model's weights in matrices that `products` multiplies with."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    ours = {id(module.weight): module.weight.numel() for module, _ in matrices(model)}
    every = {id(one): one.numel() for one in model.parameters() if one.dim() >= 2 and id(one) not in tables - set(ours)}
    return sum(ours.values()) / sum(every.values())


def products(model, tokens: int, logits: int) -> Callable[[], None]:
    """All matrix products of a forward over so many tokens that gives so many rows of logits."""
    generator = torch.Generator().manual_seed(0)
    work = []
    for module, is_head in matrices(model):
        rows = logits if is_head else tokens
        width = module.in_features if isinstance(module, torch.nn.Linear) else module.weight.shape[0]
        data = torch.randn(rows, width, generator=generator).to(module.weight)
        work.append((module, data))

    def multiply() -> None:
        with torch.inference_mode():
            for module, data in work:
                module(data)

    return multiply


def report(bench: Bench, results: dict) -> None:
    rows = [
        [
            row["case"],
            f"{row['step_ms']:.2f}",
            f"{row['products_ms']:.2f}",
            f"{row['kv_ms']:.3f}",
            f"{100 * row['reached']:.1f} %",
        ]
        for row in results["points"]
    ]
    heads = ["step", "ms", "products alone ms", "KV at copy speed ms", "share of the floor reached"]
    bench.table(f"context {results['context']}, copy {results['copy_gb_per_second']:.1f} GB/s", heads, rows)
    bench.console.print(f"  the products cover {100 * results['weights_covered']:.1f} % of the weights in matrices")


def draw(record: dict) -> str:
    rows = record["results"]["points"]
    times = {
        "step": [(row["case"], row["step_ms"]) for row in rows],
        "matrix products alone": [(row["case"], row["products_ms"]) for row in rows],
        "KV at copy speed": [(row["case"], row["kv_ms"]) for row in rows],
    }
    share = {"reached": [(row["case"], 100 * row["reached"]) for row in rows]}
    panels = [
        Panel("Time of a step and of its parts at full speed", "step (tokens)", "ms", times, bars=True),
        Panel("Share of the floor reached", "step (tokens)", "floor / step (%)", share, bars=True),
    ]
    return svg(panels, f"Roofline, {record['setting']['model']}, {record['setting']['dtype']}")
