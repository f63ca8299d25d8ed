"""Tokens a second of hf_paged and its peers, on the same requests, on this machine, in turns.

Contract: `padded` is transformers' generate in batches of 16 in the order of arrival, `padded_sorted` the same with
batches sorted by an oracle that knows the output lengths, `generate_batch` transformers' continuous batching; other
engines run in processes of their own, at the settings that their documentation advises and on as many threads.

Every round runs each engine once, in the same order (A B C A B C); the ratio to a peer is the median over
rounds of the ratio within a round. Outputs have forced lengths and are compared with transformers' own, token by token:
where the first difference lies, and how far the model's logits of the two tokens are apart there, as rounding parts
only what nearly ties. Peak memory is that of the process after loading the model, and what a run adds to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from .charts import Panel, svg
from .engines import Engine, GenerateBatch, Padded, Paged
from .machine import MIB, Peak, resident, seconds_of, trim
from .peers.process import Peer
from .setting import Bench
from .workloads import SPECS, Prompt, Workload

OURS = "hf_paged"
MAX_GAPS = 16  # differences that are looked at


def run(
    bench: Bench,
    workloads: Sequence[str] = tuple(SPECS),
    rounds: int = 3,
    peers: dict[str, str] | None = None,
    openvino_model: str | None = None,
    only: Sequence[str] = (),
    compile: bool = False,
) -> dict:
    """Measure all engines on some workloads.

    Args:
        bench: the model and its options.
        workloads: names of SPECS.
        rounds: how often each engine runs each workload.
        peers: interpreters of other environments, by the name of the engine in them ("vllm", "openvino").
        openvino_model: folder of the exported model, for "openvino".
        only: names of engines to measure beside hf_paged; empty for all.
        compile: run hf_paged with `compile=True`.
    Raises:
        ValueError: an unknown engine, or one that lacks its model.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    made = engines(bench, peers or {}, openvino_model, compile)
    if unknown := set(only) - {engine.name for engine in made}:
        raise ValueError(f"unknown engine {min(unknown)!r}; there are {', '.join(engine.name for engine in made)}")
    chosen = [engine for engine in made if not only or engine.name in (OURS, *only)]
    try:
        return {"workloads": [measure(bench, bench.workload(name), chosen, rounds) for name in workloads]}
    finally:
        for engine in made:
            engine.close()


def engines(bench: Bench, peers: dict[str, str], openvino_model: str | None, compile: bool) -> list[Engine]:
    """All that can be measured here; hf_paged first."""
    model, batch = bench.model, 4 if bench.setting.quick else 16
    room = {"kv_gib": 0.02} if bench.setting.quick else {}
    found = [
        Paged(model, compile=compile),
        Padded(model, batch),
        Padded(model, batch, sort=True),
        GenerateBatch(model, **room),
    ]
    for name, python in peers.items():
        if name == "openvino" and openvino_model is None:
            raise ValueError("openvino needs --openvino-model, the folder that `optimum-cli export openvino` wrote")
        path = openvino_model if name == "openvino" else bench.model_path
        threads = torch.get_num_threads()
        found.append(Peer(name, python, path, bench.setting.dtype, threads, bench.device.type))
    return found


def measure(bench: Bench, work: Workload, chosen: Sequence[Engine], rounds: int) -> dict:
    """One workload through all engines."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in chosen}
    peaks: dict[str, list[int]] = {engine.name: [] for engine in chosen}
    outputs: dict[str, list[list[int]]] = {}
    loaded = resident()
    for number in range(rounds + 1):  # the first one warms up, with few and short requests
        prompts = [Prompt([17 + (7 * row + at) % 200 for at in range(24)], 4) for row in range(2)]
        prompts = list(work.prompts) if number else prompts
        for engine in chosen:
            bench.say(f"{work.name}: {engine.name}, {f'round {number} of {rounds}' if number else 'warming up'}")
            took, peak, tokens = once(engine, prompts, bench.device, loaded)
            if number:
                check_lengths(engine.name, tokens, prompts)
                seconds[engine.name].append(took)
                peaks[engine.name].append(peak)
                outputs[engine.name] = tokens
    reference = next((engine.name for engine in chosen if engine.name == "padded"), OURS)
    rows = {}
    for engine in chosen:
        name = engine.name
        rows[name] = {
            "seconds": [round(value, 4) for value in seconds[name]],
            "tokens_per_second": work.new_tokens / statistics.median(seconds[name]),
            "ours_times": statistics.median(a / b for a, b in zip(seconds[name], seconds[OURS], strict=True)),
            "peak_mib": max(peaks[name]) / MIB,
            "agreement": agreement(bench.model, work.prompts, outputs[reference], outputs[name]),
            "settings": engine.settings,
        }
    return {**work.summary(), "rounds": rounds, "reference": reference, "engines": rows}


def once(engine: Engine, prompts: Sequence[Prompt], device, loaded: int) -> tuple[float, int, list[list[int]]]:
    """Seconds, peak bytes and tokens of one run; what is prepared counts for memory, not for time."""
    trim()
    tokens: list[list[int]] = []
    if isinstance(engine, Peer):
        engine.prepare(prompts)
        with Peak(engine.pid) as peak:
            tokens = engine.generate(prompts)
        return engine.seconds, peak.peak, tokens
    with Peak(device=str(device)) as peak:
        engine.prepare(prompts)
        try:
            took = seconds_of(lambda: tokens.extend(engine.generate(prompts)), device)
        finally:
            engine.release()
    added = peak.peak - peak.before
    return took, (peak.peak if peak.how == "allocator" else loaded + added), tokens


def check_lengths(name: str, outputs: Sequence[Sequence[int]], prompts: Sequence[Prompt]) -> None:
    """Raise RuntimeError unless every request got as many tokens as it asked for."""
    got, want = [len(row) for row in outputs], [one.max_new_tokens for one in prompts]
    if got != want:
        raise RuntimeError(f"{name} gave outputs of {got} tokens, asked for {want}")


def agreement(
    model, prompts: Sequence[Prompt], reference: Sequence[Sequence[int]], got: Sequence[Sequence[int]]
) -> dict:
    """How far outputs are the reference's.

    Returns:
        `same_requests`: outputs that are equal; `same_share`: tokens before the first difference, of all; `gaps`: at
        the first differences (of MAX_GAPS requests), how much larger the model's logit of the reference's token is.
    """
    same = before = 0
    gaps = []
    for one, want, tokens in zip(prompts, reference, got, strict=True):
        first = next((at for at, (a, b) in enumerate(zip(want, tokens, strict=True)) if a != b), None)
        before += len(want) if first is None else first
        same += first is None
        if first is not None and len(gaps) < MAX_GAPS:
            ids = torch.tensor([one.token_ids + list(want[:first])], device=model.device)
            with torch.no_grad():
                logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            gaps.append(float(logits[want[first]] - logits[tokens[first]]))
    return {"same_requests": same, "same_share": before / sum(map(len, reference)), "gaps": gaps}


def report(bench: Bench, results: dict) -> None:
    """Print a table for each workload."""
    for work in results["workloads"]:
        rows = [
            [
                name,
                f"{row['tokens_per_second']:.1f}",
                f"{row['ours_times']:.2f}",
                f"{row['peak_mib']:,.0f}",
                f"{row['agreement']['same_requests']}/{work['requests']}",
                f"{100 * row['agreement']['same_share']:.1f} %",
                f"{max(map(abs, row['agreement']['gaps']), default=0):.2g}",
            ]
            for name, row in work["engines"].items()
        ]
        heads = ["engine", "tokens/s", "hf_paged is x as fast", "peak MiB", "same texts", "same tokens", "largest gap"]
        title = f"{work['name']}: {work['requests']} requests, {work['prompt_tokens']:,} prompt and "
        bench.table(title + f"{work['new_tokens']:,} new tokens, {work['rounds']} rounds", heads, rows)


def draw(record: dict) -> str:
    """Tokens a second and peak memory by workload."""
    works = record["results"]["workloads"]
    names = list(works[0]["engines"])

    def series(value: str) -> dict:
        return {name: [(work["name"], work["engines"][name][value]) for work in works] for name in names}

    what = f"{record['setting']['model']}, {record['setting']['dtype']}, {record['machine']['threads']} threads"
    panels = [
        Panel("Generated tokens per second", "workload", "tokens / s", series("tokens_per_second"), bars=True),
        Panel("Peak memory", "workload", "MiB", series("peak_mib"), bars=True),
    ]
    return svg(panels, f"Throughput: {what}")
