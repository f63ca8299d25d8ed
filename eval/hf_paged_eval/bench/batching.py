"""What continuous batching costs beside the model, and what it holds over time.

`python -m hf_paged_eval.bench.batching` prints the bookkeeping of steady decode with 64 and 256 requests (thread CPU
microseconds a step for schedule, metadata and update, median over 200 steps), and beside it what the outputs cost.
`--plot FILE.svg` runs a queue of ragged requests through the demo model and draws how many blocks were held at each
step, beside what contiguous memory for every running request's full length would have taken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_paged


def tiny_model() -> LlamaForCausalLM:
    """A model whose forward costs next to nothing."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def bookkeeping(num_seqs: int, steps: int = 200) -> dict[str, float]:
    """Microseconds a step of steady decode.

    Returns:
        "bookkeeping" and "outputs" as `stats` tells them, medians of thread CPU time; "mean", of the wall time of
        bookkeeping with the steps in which the pools grew; "rest", the median thread CPU time of all else: a tiny
        model's forward, and sampling.
    """
    scheduler = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 8192}
    with hf_paged.ContinuousBatcher(tiny_model(), scheduler_config=scheduler) as batcher:
        for index in range(num_seqs):
            prompt = [3 + index % 200] * (8 + index % 16)
            batcher.add_request(prompt, generation_config={"max_new_tokens": 10 * steps, "do_sample": False})
        for _ in range(20):
            batcher.step()
        times, start = [], batcher.stats().schedule_seconds
        for _ in range(steps):
            before = time.thread_time_ns()
            batcher.step()
            times.append((time.thread_time_ns() - before) / 1000)
        stats = batcher.stats()
    return {
        "bookkeeping": stats.bookkeeping_us,
        "outputs": stats.outputs_us,
        "mean": 1e6 * (stats.schedule_seconds - start) / steps,
        "rest": statistics.median(times) - stats.bookkeeping_us - stats.outputs_us,
    }


def kv_use(model, num_requests: int, block_size: int = 16, max_num_seqs: int = 16, seed: int = 0) -> dict[str, list]:
    """Blocks over time for a queue of ragged requests.

    Returns:
        For each step "held" (blocks that the batcher holds), "tokens" (blocks that the stored tokens would just fill)
        and "contiguous" (blocks of memory that the running requests would take with their full length reserved).
    """
    rng = random.Random(seed)
    vocab = model.get_input_embeddings().weight.shape[0]
    series: dict[str, list] = {"held": [], "tokens": [], "contiguous": []}
    config = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 256}
    cache = {"block_size": block_size}
    with hf_paged.ContinuousBatcher(model, cache_config=cache, scheduler_config=config) as batcher:
        full: dict[str, int] = {}
        for _ in range(num_requests):
            prompt = [rng.randrange(3, vocab) for _ in range(rng.choice((12, 30, 60, 120, 240)))]
            limit = 160
            # Random tokens end nothing; what a real text does, stopping before its limit, stands in here.
            new = rng.randrange(8, limit // 2)
            request = batcher.add_request(
                prompt, generation_config={"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
            )
            full[request] = len(prompt) + limit
        running: dict[str, int] = {}
        while shown := batcher.step():
            stats = batcher.stats()
            for output in shown:
                running[output.request_id] = full[output.request_id]
                if output.finished:
                    del running[output.request_id]
            series["held"].append(stats.blocks_used)
            series["tokens"].append(stats.blocks_used * (1 - stats.waste))
            series["contiguous"].append(sum(-(-length // block_size) for length in running.values()))
    return series


_COLOURS = {"contiguous": "#b0b0b0", "held": "#1f6fb2", "tokens": "#2e9e5b"}
_NAMES = {
    "contiguous": "full length reserved for each running request",
    "held": "held by the batcher",
    "tokens": "filled with tokens",
}


def svg(series: dict[str, Sequence[float]], title: str, width: int = 720, height: int = 320) -> str:
    """A line for each series over the steps."""
    left, top, right, bottom = 56, 40, 16, 40
    steps, highest = max(map(len, series.values())), max(max(values) for values in series.values())
    across, down = width - left - right, height - top - bottom

    def point(step: int, value: float) -> str:
        return f"{left + across * step / max(1, steps - 1):.1f},{top + down * (1 - value / highest):.1f}"

    text = 'font-family="sans-serif" font-size="12" fill="#333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="20" {text} font-weight="bold">{title}</text>',
    ]
    for tick in range(5):
        value = highest * tick / 4
        y = top + down * (1 - tick / 4)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" {text} text-anchor="end">{value:.0f}</text>')
        step = (steps - 1) * tick // 4
        x = left + across * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" {text} text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{left + across / 2}" y="{height - 6}" {text} text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(series.items()):
        line = " ".join(point(step, value) for step, value in enumerate(values))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[name]}" stroke-width="1.5"/>')
        y = top + 14 + 16 * number
        parts.append(f'<text x="{width - right - 8}" y="{y}" {text} text-anchor="end">{_NAMES[name]}</text>')
        parts.append(
            f'<line x1="{width - right - 326}" y1="{y - 4}" x2="{width - right - 302}" y2="{y - 4}" '
            f'stroke="{_COLOURS[name]}" stroke-width="3"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", help="SVG file to write the use of the KV cache to")
    parser.add_argument("--model", help="folder or Hub name of a model; the demo model if left out")
    parser.add_argument("--requests", type=int, default=48)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for count in (64, 256):
        found = bookkeeping(count)
        print(
            f"{count:4} requests in steady decode: bookkeeping {found['bookkeeping']:.0f} us a step (median thread "
            f"CPU; {found['mean']:.0f} of wall time on average, growing pools included), tokens handed out and "
            f"RequestOutputs {found['outputs']:.0f} us, all else of a tiny model's step {found['rest']:.0f} us"
        )
    if options.plot:
        model = AutoModelForCausalLM.from_pretrained(options.model or hf_paged.demo_model_path(), dtype=torch.float32)
        series = kv_use(model, options.requests)
        with open(options.plot, "w", encoding="utf-8") as file:
            file.write(svg(series, f"KV blocks over time, {options.requests} ragged requests, 16 at once"))
        means = {name: statistics.mean(values) for name, values in series.items()}
        print(", ".join(f"{name} {mean:.0f} blocks on average" for name, mean in means.items()), "->", options.plot)


if __name__ == "__main__":
    main()
