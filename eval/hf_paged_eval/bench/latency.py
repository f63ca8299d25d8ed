"""How long requests wait: short ones among long ones, static batching against continuous, in a burst and as a stream.

Contract: both ways serve the same requests with the same arrival times, in real time, and every token is timed when it
exists. Static batching takes up to `batch_size` requests that have arrived, in their order, and generates until the
longest has ended; its tokens count as they come, and a request is complete with its own last token. Continuous
batching is a ContinuousBatcher; requests join between two steps. Arrivals are those of a Poisson process at a rate that
the slower way can keep up with.

TTFT is the time from arrival to the first token, TBT that between two tokens of a request, completion that from
arrival to the last token. Percentiles are over requests (TBT: over all gaps), by the nearest rank.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_paged

from .charts import Panel, svg
from .engines import forced, left_padded
from .setting import Bench
from .workloads import Prompt

STATIC, CONTINUOUS = "static batching", "continuous batching"
LOAD = 0.7  # of what the slower way serves in a burst


@dataclass
class Served:
    """One request and when its tokens came, in seconds since the start."""

    prompt: Prompt
    arrival: float
    is_long: bool
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def completion(self) -> float:
        return self.tokens[-1] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


def run(bench: Bench, requests: int | None = None, rate: float | None = None, batch_size: int = 16) -> dict:
    """Serve a burst and a Poisson stream both ways.

    Args:
        bench: the model and its options.
        requests: how many, a quarter of them long; None for 48 (8 in a quick run).
        rate: requests a second of the stream; None for LOAD times what the slower way served in the burst.
        batch_size: of static batching.
    """
    quick = bench.setting.quick
    requests = (8 if quick else 48) if requests is None else requests
    if requests < 4 or batch_size < 1 or (rate is not None and rate <= 0):
        raise ValueError(f"expected requests >= 4, batch_size >= 1, rate > 0; got {requests}, {batch_size}, {rate}")
    prompts = requests_of(bench, requests)
    _warm_up(bench, prompts[:2])
    batch_size = min(batch_size, 4) if quick else batch_size
    ways = {
        STATIC: lambda work: static(bench.model, work, batch_size),
        CONTINUOUS: lambda work: continuous(bench, work),
    }
    scenarios, speeds = {}, []
    arrivals = [0.0] * requests
    for scenario in ("burst", "poisson"):
        if scenario == "poisson":
            rate = rate or LOAD * min(speeds)
            rng = random.Random(f"arrivals {bench.setting.seed}")
            arrivals, now = [], 0.0
            for _ in range(requests):
                now += rng.expovariate(rate)
                arrivals.append(now)
        scenarios[scenario] = {"rate": rate if scenario == "poisson" else None, "ways": {}}
        for name, serve in ways.items():
            bench.say(f"{scenario}: {name}")
            served = [Served(one, at, is_long) for (one, is_long), at in zip(prompts, arrivals, strict=True)]
            serve(served)
            last = max(one.tokens[-1] for one in served)
            speeds.append(requests / last)
            scenarios[scenario]["ways"][name] = {
                "seconds": last,
                "all": figures(served),
                "short": figures([one for one in served if not one.is_long]),
                "long": figures([one for one in served if one.is_long]),
            }
    return {"requests": requests, "batch_size": batch_size, "scenarios": scenarios}


def requests_of(bench: Bench, count: int) -> list[tuple[Prompt, bool]]:
    """Requests of real text, every fourth long; with each, whether it is.

    Short: 24 to 64 prompt tokens and 16 to 32 new; long: 384 to 512 and 96 to 160 (a quick run: a tenth of it).
    """
    text = bench.ids
    rng, scale = random.Random(f"latency {bench.setting.seed}"), 10 if bench.setting.quick else 1
    made = []
    for index in range(count):
        is_long = index % 4 == 1
        length = rng.randint(384, 512) if is_long else rng.randint(24, 64)
        new = rng.randint(96, 160) if is_long else rng.randint(16, 32)
        length, new = max(3, length // scale), max(2, new // scale)
        start = rng.randrange(len(text) - length)
        made.append((Prompt(text[start : start + length], new), is_long))
    return made


def _warm_up(bench: Bench, prompts: Sequence[tuple[Prompt, bool]]) -> None:
    for serve in (lambda work: static(bench.model, work, 2), lambda work: continuous(bench, work)):
        serve([Served(Prompt(one.token_ids, 2), 0.0, False) for one, _ in prompts])


class _Clock(StoppingCriteria):
    """Notes when each step of generate has its tokens; stops nothing."""

    def __init__(self, start: float) -> None:
        self._start, self.times = start, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter() - self._start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def static(model, work: Sequence[Served], batch_size: int) -> None:
    """Serve by padded batches, one after the other."""
    start, done = time.perf_counter(), 0
    while done < len(work):
        now = time.perf_counter() - start
        arrived = [one for one in work[done:] if one.arrival <= now][:batch_size]
        if not arrived:
            time.sleep(max(0.0, work[done].arrival - now))
            continue
        done += len(arrived)
        ids, mask = left_padded([one.prompt.token_ids for one in arrived], 0, model.device)
        clock = _Clock(start)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.prompt.max_new_tokens for one in arrived),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        for one in arrived:
            one.tokens = clock.times[: one.prompt.max_new_tokens]


def continuous(bench: Bench, work: Sequence[Served]) -> None:
    """Serve by a ContinuousBatcher."""
    with hf_paged.ContinuousBatcher(bench.model) as batcher:
        start, added, running = time.perf_counter(), 0, {}
        while added < len(work) or running:
            now = time.perf_counter() - start
            while added < len(work) and work[added].arrival <= now:
                one = work[added]
                name = batcher.add_request(one.prompt.token_ids, generation_config=forced(one.prompt.max_new_tokens))
                running[name], added = one, added + 1
            if not running:
                time.sleep(max(0.0, work[added].arrival - now))
                continue
            outputs = batcher.step()
            now = time.perf_counter() - start
            for output in outputs:
                running[output.request_id].tokens += [now] * len(output.new_token_ids)
                if output.finished:
                    if output.error is not None:
                        raise output.error
                    del running[output.request_id]


def figures(served: Sequence[Served]) -> dict:
    """Percentiles of some requests, in seconds; `completions` are all of them, sorted."""
    ttft, completion = sorted(one.ttft for one in served), sorted(one.completion for one in served)
    gaps = sorted(gap for one in served for gap in one.gaps)
    return {
        "requests": len(served),
        **{
            f"{name}_p{share}": percentile(values, share)
            for name, values in (("ttft", ttft), ("tbt", gaps), ("completion", completion))
            for share in (50, 99)
        },
        "completions": [round(value, 4) for value in completion],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank of sorted values."""
    return values[max(0, math.ceil(share / 100 * len(values)) - 1)]


def report(bench: Bench, results: dict) -> None:
    for scenario, entry in results["scenarios"].items():
        rate = f" at {entry['rate']:.2f} requests/s" if entry["rate"] else ""
        rows = []
        for way, row in entry["ways"].items():
            for kind in ("short", "long"):
                ms = [f"{1000 * row[kind][f'{name}_p{share}']:,.0f}" for name in NAMES for share in (50, 99)]
                rows.append([f"{way}, {kind}", *ms])
        heads = [f"{name} p{share} ms" for name in ("TTFT", "TBT", "completion") for share in (50, 99)]
        bench.table(f"{scenario}{rate}: {results['requests']} requests", ["requests", *heads], rows)


NAMES = ("ttft", "tbt", "completion")


def draw(record: dict) -> str:
    """Completion of short requests, as a distribution, and the percentiles."""
    panels = []
    for scenario, entry in record["results"]["scenarios"].items():
        lines, bars = {}, {}
        for way, row in entry["ways"].items():
            done = row["short"]["completions"]
            lines[way] = [(value, 100 * (rank + 1) / len(done)) for rank, value in enumerate(done)]
            bars[way] = [
                (f"{label} p{share}", row["short"][f"{name}_p{share}"])
                for name, label in zip(NAMES, ("TTFT", "TBT", "completion"), strict=True)
                for share in (50, 99)
            ]
        panels.append(Panel(f"{scenario}: short requests", "time from arrival (s)", "completed (%)", lines))
        panels.append(Panel(f"{scenario}: short requests", "percentile", "seconds (s)", bars, bars=True))
    return svg(panels, f"Latency of short requests among long ones, {record['setting']['model']}")
