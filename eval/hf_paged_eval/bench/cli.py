"""`hf-paged bench`: the benches as commands.

Contract: every command prints its tables on stdout and its progress on stderr, and writes JSON and an SVG plot where it
is asked to. Wrong options are ValueErrors, which `hf-paged` shows in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from .setting import Bench, Setting, save

app = typer.Typer(
    help="Measure speed and memory, against other ways and engines on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="`demo`, `tiny` (random weights, for tests), a folder or a Hub name.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="Where to run; a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch and of the peers.")]
Seed = Annotated[int, typer.Option(help="Of the requests.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few and small cases: shows that all of it works.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]
Plot = Annotated[Path | None, typer.Option(help="Write an SVG plot here.")]
Workloads = Annotated[list[str] | None, typer.Option("--workload", help="May be given several times.")]
Compile = Annotated[bool, typer.Option("--compile", help="Decode through torch.compile.")]


def execute(
    name: str, module: ModuleType, setting: Setting, json: Path | None, plot: Path | None, work: Callable[[Bench], dict]
) -> None:
    """Run one bench, print it, write it."""
    for file in (json, plot):
        if file is not None and not file.parent.is_dir():  # not after minutes of measuring
            raise ValueError(f"cannot write {file}: there is no folder {file.parent}")
    with Bench(name, setting) as bench:
        results = work(bench)
        module.report(bench, results)
        record = bench.record(results)
        save(record, module.draw(record), json, plot, bench.console)


@app.command()
def throughput(
    workload: Workloads = None,
    rounds: Annotated[int | None, typer.Option(help="Runs of each engine; 3, with --quick 1.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Only this peer; may be given several times.")] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=INTERPRETER of an environment with an engine, NAME vllm or openvino; several."),
    ] = None,
    openvino_model: Annotated[str | None, typer.Option(help="Folder of the exported model, for openvino.")] = None,
    compile: Compile = False,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Tokens a second and memory, against transformers' own ways, vLLM and OpenVINO, in turns."""
    from . import throughput as module
    from .peers.process import parse_peers
    from .workloads import SPECS

    peers = parse_peers(peer_python or [])
    rounds = (1 if quick else 3) if rounds is None else rounds
    execute(
        "throughput",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, workload or tuple(SPECS), rounds, peers, openvino_model, engine or (), compile),
    )


@app.command()
def capacity(
    workload: Workloads = None,
    slots: Annotated[int | None, typer.Option(help="The budget: fully reserved requests that it holds.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Requests at once in a fixed room for keys and values, and what of it is wasted."""
    from . import capacity as module

    execute(
        "capacity",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, workload or ("mixed", "shared_prefix"), slots, block_size),
    )


@app.command()
def latency(
    requests: Annotated[int | None, typer.Option(help="How many, a quarter of them long.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second of the Poisson stream.")] = None,
    batch_size: Annotated[int, typer.Option(help="Of static batching.")] = 16,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time to the first token, between tokens, to completion: static against continuous batching."""
    from . import latency as module

    execute(
        "latency",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, requests, rate, batch_size),
    )


@app.command()
def scaling(
    batch: Annotated[list[int] | None, typer.Option(help="Batches; may be given several times.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Contexts; may be given several times.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each point.")] = None,
    compile: Compile = False,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time of a step against batch and context, with a line fitted to each."""
    from . import scaling as module

    execute(
        "scaling",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, batch, context, steps=steps, compile=compile),
    )


@app.command("block-size")
def block_size(
    size: Annotated[list[int] | None, typer.Option(help="Block sizes; may be given several times.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Of the steps that are timed.")] = None,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Waste, block tables, shared prefixes and step time by block size, with a recommendation."""
    from . import block_size as module

    execute(
        "block-size",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, size, batch),
    )


@app.command()
def roofline(
    batch: Annotated[list[int] | None, typer.Option(help="Batches; may be given several times.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each measurement.")] = None,
    compile: Compile = False,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Steps against their matrix products alone and their keys and values at copy speed."""
    from . import roofline as module

    execute(
        "roofline",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, batch, rounds=rounds, compile=compile),
    )


@app.command()
def profile(
    workload: Annotated[str, typer.Option(help="One of the workloads.")] = "mixed",
    every: Annotated[int | None, typer.Option(min=1, help="Every how many steps the profiler looks.")] = None,
    model: Model = "demo",
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Where the time of one run goes."""
    from . import profiling as module

    execute(
        "profile",
        module,
        Setting(model, dtype, device, threads, seed, quick),
        json,
        plot,
        lambda bench: module.run(bench, workload, every),
    )
