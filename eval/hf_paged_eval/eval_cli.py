"""`hf-paged eval`: quality as commands.

Contract: results go to stdout, progress to stderr, JSON where it is asked for. Wrong options are ValueErrors, which
`hf-paged` shows in one line. `gate_cli` adds its commands to `app`; the options that all share stand here.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure what the paged cache and its formats do to a model's text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="`demo`, a folder or a Hub name.")]
DType = Annotated[str, typer.Option(help="The model's: auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str | None, typer.Option(help="Where to run; a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch.")]
KVCacheDType = Annotated[str, typer.Option(help="Format of keys and values: auto, fp8_e4m3, fp8_e5m2, int8.")]
CacheConfig = Annotated[
    str | None, typer.Option(help='Further fields of PagedCacheConfig as JSON, such as {"block_size": 32}.')
]
Dataset = Annotated[str | None, typer.Option(help="Of `datasets`; the embedded text if neither this nor --path.")]
Subset = Annotated[str | None, typer.Option(help="Of the dataset.")]
Split = Annotated[str | None, typer.Option(help="Of the dataset; test.")]
Column = Annotated[str, typer.Option(help="The column with the text.")]
TextPath = Annotated[Path | None, typer.Option("--path", help="A local .txt, .json, .jsonl or .parquet file.")]
Documents = Annotated[str, typer.Option(help="`apart`, or `joined` to one.")]
Bos = Annotated[str, typer.Option(help="none, once (a document), each_window, or auto: as the tokenizer does.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Stop after so many scored tokens.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a window; each document whole if not given.")]
Stride = Annotated[int | None, typer.Option(help="New tokens of each window after the first.")]
ChunkSize = Annotated[int, typer.Option(min=1, help="Tokens of one window in one forward.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Windows at the same time.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]


@app.callback()
def _options() -> None:
    """So that a single command keeps its name."""


@app.command("score")
def score_command(
    model: Model = "demo",
    kv_cache_dtype: KVCacheDType = "auto",
    cache_config: CacheConfig = None,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Compare with the model's own dtype; or not.")
    ] = True,
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
    generation: Annotated[int, typer.Option(min=0, help="Also compare so many greedy continuations.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each of them.")] = 64,
    needle: Annotated[
        list[int] | None, typer.Option(min=64, help="Also hide a number in so many tokens; may be given several times.")
    ] = None,
    dtype: DType = "float32",
    device: Device = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Perplexity through the paged cache, and how far a format moves it from the model's own dtype."""
    from .loading import load_model
    from .score_text import print_score

    if json is not None and not json.parent.is_dir():  # not after minutes of measuring
        raise ValueError(f"cannot write {json}: there is no folder {json.parent}")
    config = cache_settings(kv_cache_dtype, cache_config)
    from hf_paged import PagedCacheConfig

    from .corpus import load_corpus
    from .metrics import summarize
    from .scoring import score

    PagedCacheConfig.from_any(config)  # a wrong setting is refused before anything is loaded
    use_threads(threads)
    network, tokenizer = load_model(model, dtype, device)
    corpus = load_corpus(
        tokenizer, dataset, subset, split, column, path, documents=documents, bos=bos, max_tokens=max_tokens
    )
    typer.echo(corpus.describe())
    result = score(
        network,
        corpus,
        cache_config=config,
        max_length=max_length,
        stride=stride,
        chunk_size=chunk_size,
        batch_size=batch_size,
        reference={} if reference else None,
        progress_bar=True,
    )
    summary, units = summarize(result.tokens), corpus.normalise(result)
    print_score(result, summary, units)
    record = {
        "model": model,
        "corpus": {"name": corpus.name, "hash": corpus.hash, "described": corpus.describe()},
        "settings": result.settings,
        "seconds": round(result.seconds, 3),
        "nll_sum": result.nll_sum,
        "units": vars(units),
        **summary.to_dict(),
    }
    if generation:
        from .agreement import greedy_agreement

        prompts = [document[:64] for document in corpus.documents if len(document) > 1][:generation]
        agreement = greedy_agreement(
            network, prompts, cache_config=config, max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        typer.echo(
            f"greedy text of {agreement.num_prompts} prompts, {max_new_tokens} tokens: {agreement.identical:.1%} the "
            f"same, first difference after {agreement.prefix:.1%} of the tokens on average"
        )
        record["generation"] = agreement.to_dict()
    if needle:
        from .needle import needle_task

        haystack = [token for document in corpus.documents for token in document]
        found = needle_task(network, tokenizer, haystack, cache_config=config, lengths=needle, chunk_size=chunk_size)
        typer.echo(
            f"needles: {found.found:.0%} of {len(found.needles)} found, {found.reference_found:.0%} with the model's "
            "own dtype"
        )
        record["needle"] = found.to_dict()
    if json is not None:
        json.write_text(json_format.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"written: {json}")


def cache_settings(kv_cache_dtype: str, more: str | None) -> dict:
    """Fields of PagedCacheConfig from the two options.

    Raises:
        ValueError: the JSON is none, or names the format a second time.
    """
    fields: dict = {}
    if more is not None:
        try:
            fields = json_format.loads(more)
        except json_format.JSONDecodeError as error:
            raise ValueError(f"--cache-config is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"--cache-config must be a JSON object, got {more}")
        if "kv_cache_dtype" in fields and kv_cache_dtype != "auto":
            raise ValueError("give the format once: by --kv-cache-dtype or in --cache-config")
    return {"kv_cache_dtype": kv_cache_dtype, **fields}


def use_threads(count: int | None) -> None:
    """Have torch use so many threads."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


from . import gate_cli  # noqa: E402, F401  (adds its commands, with the options above)
