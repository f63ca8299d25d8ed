"""The console script `hf-paged`.

Contract: `main` is the entry point. Heavy imports (torch, transformers, the evaluation room)
happen inside the commands that need them. Results go to stdout, progress and errors to stderr.
Exit status: 0 fine, 1 what the command found or could not do, 2 wrong usage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="PagedAttention for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"hf-paged {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    context.obj = traceback


@contextmanager
def _plain_errors(context: typer.Context) -> Iterator[None]:
    """One line for what a user can act on; `--traceback` for what somebody has to debug."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:  # NotImplementedError is a RuntimeError
        if context.obj:
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command()
def demo(
    context: typer.Context,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each chat.")] = 48,
) -> None:
    """Generate from paged KV with the demo model; check its text, show memory and speed."""
    with _plain_errors(context):
        from .demo import run_demo

        status = run_demo(max_new_tokens=max_new_tokens)
    raise typer.Exit(status)


@app.command()
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's folder or Hub name; `demo` is the demo model.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A text file with one prompt a line.", exists=True, dir_okay=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Wrap prompts in the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each prompt.")] = 64,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Size of the pool; it grows if not given.")] = None,
    dtype: Annotated[DType, typer.Option(help="The model's dtype.")] = DType.auto,
    device: Annotated[str | None, typer.Option(help="Where to run; a GPU if there is one.")] = None,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Sample, or take the best token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample.")] = None,
    seed: Annotated[int | None, typer.Option(help="With --sample: the same seed gives the same text.")] = None,
) -> None:
    """Generate for one or more prompts with a paged KV cache."""
    prompts = _prompts(prompt, prompts_file)
    sampling = {
        name: value
        for name, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed))
        if value is not None
    }
    if sampling and not sample:
        raise typer.BadParameter(f"{', '.join(sampling)} only with --sample")
    sampling.pop("seed", None)
    cache_config = {
        name: value for name, value in (("block_size", block_size), ("num_blocks", num_blocks)) if value is not None
    }
    with _plain_errors(context):
        from .demo_model import demo_model_path
        from .progress import step

        source = demo_model_path() if model == "demo" else model
        with step(f"Loading {model}"):
            network, tokenizer = _load(source, dtype, device)
        inputs = _tokenize(tokenizer, prompts, chat).to(network.device)
        if seed is not None:
            from transformers import set_seed

            set_seed(seed)
        with step(f"Generating for {len(prompts)} prompt{'s'[: len(prompts) > 1]}"):
            output = network.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=sample,
                cache_implementation="paged",
                cache_config=cache_config,
                **sampling,
            )
    for text, row in zip(prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
        typer.secho(f"> {text}", fg="cyan")
        typer.echo(tokenizer.decode(row, skip_special_tokens=True) + "\n")


@app.command()
def memory(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model's folder, its config.json or Hub name; `demo` is the demo model.")
    ],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of the longest request.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    mean_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request on average; --seq-len if not given.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8_e4m3, fp8_e5m2, int8, auto, or k:...,v:...")] = "fp8_e4m3",
    kv_scale_granularity: Annotated[str, typer.Option(help="What shares a scale.")] = "per_token_head",
    skip_layer: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A layer that is kept in the model's dtype; may be given several times."),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    dtype: Annotated[DType, typer.Option(help="The model's dtype; auto is the config's.")] = DType.auto,
    available: Annotated[
        str | None, typer.Option("--memory", help="Show how many requests fit in this, such as 16GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model's KV cache takes: padded, in blocks, and in blocks of 8 bits. Reads its config alone."""
    with _plain_errors(context):
        import json

        from .demo import default_console
        from .demo_model import demo_model_path
        from .memory import memory_report

        report = memory_report(
            demo_model_path() if model == "demo" else model,
            seq_len=seq_len,
            batch=batch,
            mean_len=mean_len,
            kv_cache_dtype=kv_cache_dtype,
            kv_scale_granularity=kv_scale_granularity,
            skip_layers=skip_layer or (),
            block_size=block_size,
            dtype=None if dtype is DType.auto else dtype.value,
            memory=available,
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console = default_console()
        console.print(report.table())
        if report.layers_without_kv:
            console.print(f"{report.layers_without_kv} of the layers keep no keys and values of their own.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure speed and memory; `hf-paged bench --help` lists the benches."""
    with _plain_errors(context):
        from hf_paged_eval.bench.cli import app as benches

        benches(args=context.args, prog_name="hf-paged bench")


@app.command(
    "eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def evaluate(context: typer.Context) -> None:
    """Measure quality: perplexity and divergence through the cache; `hf-paged eval --help` lists the commands."""
    with _plain_errors(context):
        from hf_paged_eval.eval_cli import app as commands

        commands(args=context.args, prog_name="hf-paged eval")


@app.command(
    "lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness, with the model `hf_paged` known to it; takes its own arguments."""
    with _plain_errors(context):
        from hf_paged_eval.lm_eval_model import run

        run(context.args)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(given or [])
    if file is not None:
        prompts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise typer.BadParameter("no prompt given: use --prompt or --prompts-file")
    return prompts


def _load(source: str | Path, dtype: DType, device: str | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype.value)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _tokenize(tokenizer: Any, prompts: list[str], chat: bool) -> Any:
    if not chat:
        return tokenizer(prompts, padding=True, return_tensors="pt")
    if not tokenizer.chat_template:
        raise ValueError("--chat: this model's tokenizer has no chat template; use --raw")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


if __name__ == "__main__":
    main()
