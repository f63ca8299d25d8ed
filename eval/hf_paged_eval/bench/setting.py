"""What every bench shares: its options, the model, and the record that it leaves.

Contract: `Bench` is a context. On the way in it sets the threads, loads the model and looks whether the machine is
quiet; on the way out it puts the threads back. `record(results)` is the JSON document of a run: machine, versions,
date, options, how busy others kept the machine before and during it, and the results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_paged

from ..loading import default_device, load_model
from ..tables import figures_table
from . import machine
from .workloads import Workload, english_ids, workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """Options of every bench.

    Attributes:
        model: "demo", "tiny" (random weights, for tests), or a folder or Hub name.
        dtype: "float32", "bfloat16" or "float16".
        device: where the model runs; None for a GPU if there is one.
        threads: of torch; None for as many as it takes by itself.
        seed: of the requests.
        quick: few and small cases: shows that all of it works, not how fast it is.
    """

    model: str = "demo"
    dtype: str = "float32"
    device: str | None = None
    threads: int | None = None
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


class Bench:
    """One run of one bench.

    Attributes:
        name: of the bench.
        setting: its options.
        model, tokenizer, model_path: what it runs; the path is what other engines load.
        device: the model's.
        console: where results go; `say` writes progress to stderr.
        warnings: what the record says against its own figures.
    """

    def __init__(self, name: str, setting: Setting, console: Console | None = None) -> None:
        self.name, self.setting = name, setting
        width = None if sys.stdout.isatty() else 140
        self.console = console or Console(highlight=False, soft_wrap=True, width=width)
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self.warnings: list[str] = []
        self._ids: list[int] | None = None

    def __enter__(self) -> Bench:
        self._threads = machine.threads(self.setting.threads)
        self._threads.__enter__()
        try:
            self.say(f"loading {self.setting.model}")
            self.model_path, self.model, self.tokenizer = load(self.setting)
            self.device = self.model.device
            others = machine.Others()
            time.sleep(0.1 if self.setting.quick else 1.0)
            self._others_before = others.cores()
            self._warn(machine.others_warning(self._others_before, "before the start"))
            self._others = machine.Others()
            self.about = machine.describe(str(self.device))
        except BaseException:
            self._threads.__exit__(*sys.exc_info())
            raise
        self.console.print(
            f"[bold]{self.name}[/]: {self.setting.model}, {self.setting.dtype}, {self.about['processor']}, "
            f"{self.about['threads']} threads, torch {self.about['torch']}, transformers {self.about['transformers']}"
        )
        return self

    def __exit__(self, *exception) -> None:
        self._threads.__exit__(*exception)

    def say(self, text: str) -> None:
        self._errors.print(text)

    @property
    def ids(self) -> list[int]:
        """The text that prompts are cut from."""
        if self._ids is None:
            self._ids = english_ids(self.tokenizer)
        return self._ids

    def workload(self, name: str) -> Workload:
        """One of the named workloads, in the model's own tokens.

        Raises:
            ValueError: the model's vocabulary or positions are too small for it.
        """
        made = workload(name, self.ids, self.setting.seed, self.setting.quick)
        largest = max(max(one.token_ids) for one in made.prompts)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if largest >= vocabulary:
            raise ValueError(f"the tokenizer gives token {largest}, the model has {vocabulary}")
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        needed = max(one.total for one in made.prompts)
        if positions is not None and needed > positions:
            raise ValueError(f"workload {name!r} needs {needed} positions, the model has {positions}")
        return made

    def record(self, results: Mapping) -> dict:
        """The JSON document of this run; says on the console when the machine was not quiet."""
        during = self._others.cores()
        self._warn(machine.others_warning(during, "during the measurement"))
        return {
            "bench": self.name,
            "machine": {
                **self.about,
                "others_before": round(self._others_before, 3),
                "others_during": round(during, 3),
            },
            "setting": asdict(self.setting),
            "warnings": self.warnings,
            "results": dict(results),
        }

    def _warn(self, text: str | None) -> None:
        if text:
            self.warnings.append(text)
            self.console.print(f"[bold yellow]warning:[/] {text}")

    def table(self, title: str, columns: list[str], rows: list[list]) -> None:
        """Print figures; the first column is text."""
        self.console.print(figures_table(title, columns, rows))


def save(record: dict, drawing: str, json_file: Path | None, plot_file: Path | None, console: Console) -> None:
    """Write the record and the plot where they are asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_file}")
    if plot_file is not None:
        plot_file.write_text(drawing, encoding="utf-8")
        console.print(f"written: {plot_file}")


def load(setting: Setting):
    """Path, model and tokenizer; the model neither samples nor ends before the length that is asked for."""
    path = hf_paged.demo_model_path() if setting.model in ("demo", "tiny") else setting.model
    if setting.model == "tiny":
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = tiny_model(len(tokenizer)).to(DTYPES[setting.dtype])
        model.to(setting.device or default_device())
    else:
        model, tokenizer = load_model(str(path), setting.dtype, setting.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=pad)
    model.generation_config.eos_token_id = None
    return str(path), model, tokenizer


def tiny_model(vocab_size: int, layers: int = 2, hidden: int = 32, seed: int = 0) -> LlamaForCausalLM:
    """A model whose forward costs next to nothing; wide weights, so that its best tokens do not tie."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return model.eval()


def kv_bytes_per_token(model) -> float:
    """Bytes of keys and values that transformers' own cache holds for one token, measured."""
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 8
