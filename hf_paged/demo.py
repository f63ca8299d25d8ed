"""`hf-paged demo`: the demo model generates from paged KV, checked before the user's eyes.

Contract: `run_demo` generates for one left-padded batch of chats of very different length, once
with plain `generate` and once with `cache_implementation="paged"`, then for each chat alone with
plain `generate`, which has no padding and is the oracle. It prints what each cache held and how
fast each was, and returns 0 only if every paged row equals its oracle token for token. A
difference where the oracle's two best logits are closer than TIE_GAP is a tie, not a mismatch:
there another order of float32 sums may choose either.

Memory is measured (storage_meter); the share that real tokens need is the real tokens times the
bytes that one position measured in the prompts run alone, where every position is real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .demo_model import MODEL_NAME, demo_model_path, load_demo_model
from .demo_prompts import CHATS
from .progress import step
from .storage_meter import PeakMeter

TIE_GAP = 1e-3
MIB = 2**20


@dataclass
class Run:
    """One timed call of generate: the new tokens of each row up to its end of text."""

    rows: list[list[int]]
    seconds: float
    meter: PeakMeter

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.rows)) / self.seconds

    def real_positions(self, prompt_lengths: Sequence[int], padded_length: int) -> int:
        """Positions cached at the peak that belong to a token of a prompt or of an answer."""
        if self.meter.tokens is not None:
            return self.meter.tokens
        fed = self.meter.seq_length - padded_length
        return sum(length + min(len(row), fed) for length, row in zip(prompt_lengths, self.rows, strict=True))


def run_demo(max_new_tokens: int = 48, console: Console | None = None) -> int:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    console = console or default_console()
    demo_model_path()  # shows its own progress on the run that converts
    with step(f"Loading {MODEL_NAME}"):
        model, tokenizer = load_demo_model()
    batch, alone = tokenize(tokenizer, CHATS)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    padded_length = batch["input_ids"].shape[1]
    console.print(
        f"\n{MODEL_NAME}, float32: {len(lengths)} chats of {', '.join(map(str, lengths))} tokens, "
        f"padded to {padded_length}; up to {max_new_tokens} new tokens each, greedy.\n"
    )

    with step("Warming up"):
        for extra in ({}, {"cache_implementation": "paged"}):
            timed_run(model, alone[0], 2, extra)
    with step("Plain generate, padded batch"):
        plain = timed_run(model, batch, max_new_tokens)
    with step('Paged generate, cache_implementation="paged"'):
        paged = timed_run(model, batch, max_new_tokens, {"cache_implementation": "paged"})
    with step("Plain generate, each prompt alone (the oracle)"):
        oracle = [oracle_run(model, prompt, max_new_tokens) for prompt in alone]

    verdicts = [verdict(*pair) for pair in zip(paged.rows, oracle, strict=True)]
    plain_verdicts = [verdict(*pair) for pair in zip(plain.rows, oracle, strict=True)]
    needed = sum(o.meter.peak_bytes for o in oracle) / sum(o.meter.positions for o in oracle)
    console.print(summary_table((plain, paged), (plain_verdicts, verdicts), lengths, padded_length, needed))
    console.print(text_table(tokenizer, paged.rows, lengths, verdicts))
    wrong = sum(v.startswith("DIFFERS") for v in verdicts)
    if wrong:
        console.print(f"[bold red]{wrong} of {len(verdicts)} paged rows differ from plain generate.[/]")
        return 1
    console.print(f"[bold green]All {len(verdicts)} paged rows equal plain generate of the prompt alone.[/]")
    return 0


def default_console() -> Console:
    """stdout; in a pipe or a log, wide enough that nothing of the tables is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def tokenize(tokenizer: Any, chats: list) -> tuple[Any, list[Any]]:
    """The left-padded batch, and each chat alone, without padding."""
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    batch = tokenizer.apply_chat_template(chats, padding=True, **options)
    return batch, [tokenizer.apply_chat_template([chat], **options) for chat in chats]


def timed_run(model: Any, inputs: Any, max_new_tokens: int, extra: dict[str, Any] | None = None) -> Run:
    with PeakMeter(model) as meter:
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **(extra or {}))
        seconds = time.perf_counter() - start
    return Run(new_tokens(output, inputs, model.generation_config.eos_token_id), seconds, meter)


def new_tokens(output: Any, inputs: Any, eos_token_id: int) -> list[list[int]]:
    """Each row's new tokens up to and with its first end of text; what follows is padding."""
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(eos_token_id) + 1] if eos_token_id in row else row for row in rows]


@dataclass
class Oracle:
    """Plain generate of one prompt alone, with the gap between the two best logits of each step."""

    row: list[int]
    gaps: list[float]
    meter: PeakMeter


def oracle_run(model: Any, inputs: Any, max_new_tokens: int) -> Oracle:
    with PeakMeter(model) as meter:
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = [logits[0].float().topk(2).values for logits in output.logits]
    (row,) = new_tokens(output.sequences, inputs, model.generation_config.eos_token_id)
    return Oracle(row, [float(first - second) for first, second in best], meter)


def verdict(row: list[int], oracle: Oracle) -> str:
    if row == oracle.row:
        return "equal"
    pairs = zip(row, oracle.row, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(row), len(oracle.row)))
    # Past the oracle's end there is no gap that could excuse a token.
    gap = oracle.gaps[at] if at < len(oracle.gaps) else float("inf")
    if gap < TIE_GAP:
        return f"tie at token {at + 1} (gap {gap:.1e})"
    return f"DIFFERS at token {at + 1} (gap {gap:.1e})"


def summary_table(
    runs: Sequence[Run],
    verdicts: Sequence[list[str]],
    lengths: Sequence[int],
    padded_length: int,
    bytes_per_position: float,
) -> Table:
    held = [run.meter.peak_bytes for run in runs]
    real = [run.real_positions(lengths, padded_length) * bytes_per_position for run in runs]
    waste = [1 - r / h if h else float("nan") for r, h in zip(real, held, strict=True)]
    table = Table("", "padded DynamicCache", "paged", title="KV cache, measured at its peak")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("KV memory held", *(f"{h / MIB:.1f} MiB" for h in held))
    table.add_row("of it real tokens' K and V", *(f"{r / MIB:.1f} MiB" for r in real))
    table.add_row("waste", *(f"{w:.1%}" for w in waste))
    table.add_row("tokens/s", *(f"{run.tokens_per_second:.1f}" for run in runs))
    table.add_row("seconds", *(f"{run.seconds:.1f}" for run in runs))
    table.add_row("rows equal to the prompt alone", *(f"{v.count('equal')} of {len(v)}" for v in verdicts))
    return table


def text_table(tokenizer: Any, rows: list[list[int]], lengths: Sequence[int], verdicts: list[str]) -> Table:
    table = Table(title="What was generated", expand=True)
    table.add_column("tokens", justify="right")
    table.add_column("chat", ratio=2)
    table.add_column("paged answer", ratio=4)
    table.add_column("against the prompt alone", no_wrap=True)
    for chat, length, row, said in zip(CHATS, lengths, rows, verdicts, strict=True):
        answer = tokenizer.decode(row, skip_special_tokens=True)
        table.add_row(str(length), shorten(chat[-1]["content"], 60), shorten(answer, 160), said)
    return table


def shorten(text: str, width: int) -> str:
    line = " ".join(text.split())
    return escape(line if len(line) <= width else line[: width - 3] + "...")
