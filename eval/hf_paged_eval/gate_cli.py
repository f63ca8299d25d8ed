"""`hf-paged eval gate`, `sweep` and `small-model`.

Contract: exit status 0 pass or warn, 1 regression, 2 could not run, 3 inconclusive; for a sweep 0 where some format
passes. An error of any kind is 2, never 1: a gate that crashed has found no regression. Tables go to stdout, progress
to stderr, reports to a folder.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .eval_cli import (
    BatchSize,
    Bos,
    ChunkSize,
    Column,
    Dataset,
    Device,
    Documents,
    DType,
    MaxLength,
    MaxTokens,
    Model,
    Split,
    Stride,
    Subset,
    TextPath,
    Threads,
    app,
    use_threads,
)
from .tables import figures_table

Config = Annotated[Path | None, typer.Option(help="Your own gates.toml; without it the package's limits hold.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens in a block of the cache.")]
Report = Annotated[Path, typer.Option("--report", help="Folder for the reports.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.command()
def gate(
    context: typer.Context,
    model: Model = "demo",
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3, fp8_e5m2, int8, or k:FORMAT,v:FORMAT.")] = "fp8_e4m3",
    kv_scale_granularity: Annotated[str | None, typer.Option(help="per_token_head if not given.")] = None,
    kv_scales: Annotated[Path | None, typer.Option(help="File of calibrated scales, for a fixed granularity.")] = None,
    skip_layers: Annotated[str | None, typer.Option(help="Layers kept in the model's dtype, as in 0,1.")] = None,
    rotate_keys: Annotated[
        bool | None, typer.Option("--rotate-keys/--no-rotate-keys", help="As PagedCacheConfig has it if not given.")
    ] = None,
    config: Config = None,
    dtype: DType = "auto",
    device: Device = None,
    threads: Threads = None,
    dataset: Dataset = None,
    subset: Subset = None,
    split: Split = None,
    column: Column = "text",
    path: TextPath = None,
    documents: Documents = "apart",
    bos: Bos = "auto",
    max_tokens: MaxTokens = 20_000,
    max_length: MaxLength = None,
    stride: Stride = None,
    chunk_size: ChunkSize = 64,
    batch_size: BatchSize = 8,
    block_size: BlockSize = 16,
    baselines: Annotated[
        Path | None, typer.Option(help="Stored baseline (a file, or a folder of them); else the package's own.")
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Store the unquantised perplexity in --baselines.")
    ] = False,
    report: Report = Path("gate-report"),
    quiet: Quiet = False,
) -> None:
    """Hold a cache format against limits: exit 0 pass or warn, 1 regression, 2 could not run, 3 inconclusive."""
    from . import report as reports

    chosen = {
        "kv_cache_dtype": kv_cache_dtype,
        "kv_scale_granularity": kv_scale_granularity,
        "kv_scales": None if kv_scales is None else str(kv_scales),
        "rotate_keys": rotate_keys,
        "block_size": block_size,
    }
    candidate = {name: value for name, value in chosen.items() if value is not None}
    console = _console()

    def failed(error: str) -> None:
        with contextlib.suppress(Exception):  # the error itself is what matters
            reports.write_reports(reports.error_record(error, _shown_name(model), candidate), report)

    with _status_two(context, failed):
        if skip_layers is not None:
            candidate["skip_layers"] = _layers(skip_layers)
        from .gate_limits import limits_for
        from .gate_run import run_gate

        limits_for([model], kv_cache_dtype, config)  # a wrong file or dtype is told before the model is loaded
        source = _Source(dataset, subset, split, column, path, documents, bos, max_tokens)
        network, tokenizer = _load(model, dtype, device, threads, quiet)
        text = source.text(tokenizer, console)
        result = run_gate(
            network,
            text,
            candidate,
            name=model,
            config=config,
            max_length=max_length,
            stride=stride,
            chunk_size=chunk_size,
            batch_size=batch_size,
            baselines=baselines,
            update_baseline=update_baseline,
            progress_bar=not quiet,
        )
        show(result.record, console)
        written = reports.write_reports(result.record, report)
        console.print(f"written: {', '.join(str(file) for file in written.values())}")
    raise typer.Exit(result.verdict.exit_code)


@app.command()
def sweep(
    context: typer.Context,
    model: Model = "demo",
    kv_cache_dtype: Annotated[list[str] | None, typer.Option(help="Several; all 8-bit formats if not given.")] = None,
    kv_scale_granularity: Annotated[
        list[str] | None, typer.Option(help="Several; fixed ones are calibrated first. per_token_head if not given.")
    ] = None,
    skip_layers: Annotated[
        list[str] | None, typer.Option(help="Several: none, 0,1 or worst:2 (largest errors). none if not given.")
    ] = None,
    no_rotate_keys: Annotated[bool, typer.Option("--no-rotate-keys", help="Keep 8-bit keys as they come.")] = False,
    config: Config = None,
    dtype: DType = "auto",
    device: Device = None,
    threads: Threads = None,
    dataset: Dataset = None,
    subset: Subset = None,
    split: Split = None,
    column: Column = "text",
    path: TextPath = None,
    documents: Documents = "apart",
    bos: Bos = "auto",
    max_tokens: MaxTokens = 5_000,
    max_length: MaxLength = None,
    stride: Stride = None,
    chunk_size: ChunkSize = 64,
    batch_size: BatchSize = 8,
    block_size: BlockSize = 16,
    report: Report = Path("gate-report"),
    quiet: Quiet = False,
) -> None:
    """Gate many cache formats; recommend the smallest that passes. Exit status as of `gate`."""
    console = _console()
    with _status_two(context):
        from . import sweep as sweeps
        from .gate_limits import limits_for
        from .gate_run import run_gate
        from .identity import model_identity
        from .quant_error import measure_cache
        from .sweep_scales import with_scales

        dtypes = kv_cache_dtype or list(sweeps.DTYPES)
        for one in dtypes:
            limits_for([model], one, config)
        source = _Source(dataset, subset, split, column, path, documents, bos, max_tokens)
        network, tokenizer = _load(model, dtype, device, threads, quiet)
        text = source.text(tokenizer, console)
        base = {"block_size": block_size} | ({"rotate_keys": False} if no_rotate_keys else {})
        rank = functools.partial(measure_cache, network, text.documents, {**base, "kv_cache_dtype": dtypes[0]})
        skips = sweeps.parse_skips(skip_layers or ["none"], lambda count: rank().worst(count))
        configs = sweeps.candidates(dtypes, kv_scale_granularity or [sweeps.DYNAMIC], skips, base)
        identity = model_identity(network, model)

        def one_gate(one: Mapping) -> Any:
            return run_gate(
                network,
                text,
                with_scales(network, one, source.calibration(tokenizer), report),
                name=model,
                config=config,
                max_length=max_length,
                stride=stride,
                chunk_size=chunk_size,
                batch_size=batch_size,
                progress_bar=not quiet,
                identity=identity,
            )

        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        record = sweeps.run_sweep(configs, one_gate, lambda line: errors.print(line, markup=False))
        _print_table(console, f"sweep: {identity.name}", sweeps.HEAD, sweeps.table_rows(record), text=(0, 1, 7, 8))
        console.print(sweeps.advice(record), markup=False)
        written = sweeps.write_sweep(record, report)
        console.print(f"written: {', '.join(str(file) for file in written.values())}", markup=False)
    raise typer.Exit(record["exit_code"])


@app.command("small-model")
def small_model(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where to save it; nothing may be there.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; the default takes about a minute.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a small model on the text that Python brings along: a second model for a gate, without any download."""
    with _status_two(context):
        from .small_model import STEPS, train_small_model

        loss = train_small_model(folder, steps=steps or STEPS, progress_bar=not quiet)
        typer.echo(f"{folder}: loss {loss:.3f} nats a token after {steps or STEPS} steps")


class _Source:
    """The text that the options name."""

    def __init__(self, dataset, subset, split, column, path, documents, bos, max_tokens) -> None:
        self.where = {"dataset": dataset, "subset": subset, "split": split, "column": column, "path": path}
        self.how = {"documents": documents, "bos": bos, "max_tokens": max_tokens}

    def text(self, tokenizer: Any, console: Console) -> Any:
        from .gate_text import text_of

        text = text_of(tokenizer, **self.where, **self.how)
        console.print(f"text: {text.about['described']}", markup=False)
        return text

    def calibration(self, tokenizer: Any) -> Callable[[], list[list[int]]]:
        """Documents of the same source behind those that are scored."""
        from .gate_text import calibration_documents

        return functools.partial(calibration_documents, tokenizer, self.where, self.how)


# -- printing --------------------------------------------------------------------------------------


def show(record: Mapping, console: Console | None = None) -> None:
    """Print a gate's table and what it came to."""
    from .gate_words import METRIC_NAMES, headline, interval, scope_name, shown

    console = console or _console()
    rows = []
    for check in record["checks"]:
        metric = check["metric"]
        row = [scope_name(check["scope"]), METRIC_NAMES[metric], shown(metric, check["value"]), interval(check)]
        row += [shown(metric, check["warn"]), shown(metric, check["fail"]), f"{check['num_tokens']:,}"]
        rows.append([*row, check["outcome"] + (f": {check['message']}" if check["message"] else "")])
    head = ["where", "metric", "value", "± 2 standard errors", "warn", "fail", "tokens", "outcome"]
    _print_table(console, f"limits: {record['limits']['source']}", head, rows, text=(0, 1, 7))
    for note in record["notes"]:
        console.print(f"note: {note}", markup=False)
    style = {"pass": "green", "warn": "yellow", "fail": "red", "inconclusive": "magenta"}[record["outcome"]]
    console.print(headline(record), style=f"bold {style}", markup=False)


def _print_table(console: Console, title: str, head: list[str], rows: list[list[str]], text: tuple[int, ...]) -> None:
    from rich.markup import escape

    cells = [map(escape, row) for row in rows]
    console.print(figures_table(escape(title), head, cells, text, wrap=True))


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


# -- what is asked for -----------------------------------------------------------------------------


@contextlib.contextmanager
def _status_two(context: typer.Context, failed: Callable[[str], None] = lambda error: None) -> Iterator[None]:
    """Whatever goes wrong ends with status 2, one line for what a user can act on."""
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except BaseException as error:
        known = isinstance(error, ValueError | RuntimeError | OSError)
        if not isinstance(error, KeyboardInterrupt) and (not known or _wants_traceback(context)):
            traceback.print_exc()
        text = str(error) if known else f"{type(error).__name__} {error}".rstrip()
        failed(text or type(error).__name__)
        typer.secho(f"error: could not run: {text}", fg="red", err=True)
        raise typer.Exit(2) from error


def _wants_traceback(context: typer.Context) -> bool:
    """`hf-paged --traceback eval gate`, where the outer command is in the same process."""
    return "--traceback" in sys.argv[1:2] or bool(context.find_root().obj)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError as error:
        raise ValueError(f"--skip-layers must be numbers as in 0,1, got {text!r}") from error


def _shown_name(model: str) -> str:
    from .identity import display_name

    return display_name(model)


def _load(model: str, dtype: str, device: str | None, threads: int | None, quiet: bool) -> tuple[Any, Any]:
    from .loading import load_model

    use_threads(threads)
    if not quiet:
        typer.echo(f"loading {_shown_name(model)} ...", err=True)
    return load_model(model, dtype, device)
