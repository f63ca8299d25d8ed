"""`score`: how likely a model finds texts when it reads them through the paged cache.

Contract: teacher forcing. Every document goes through the cache in chunks; each scored token is predicted from keys and
values as they stand in the blocks, in whatever format that is. The number does not depend on chunk size, batch size,
order or padding (there is none), beyond the rounding of the model's own dtype. Nothing is sampled. A document's first
token has nothing before it: it is context only, unless a BOS token stands before every window.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from hf_paged import PagedCacheConfig

from .divergence import compare
from .lockstep import run_windows
from .token_table import TokenTable
from .windows import Window, check_window, rolling_windows


@dataclass(frozen=True)
class ScoreResult:
    """What `score` found.

    Attributes:
        perplexity: exp(nll_sum / num_tokens), per token.
        num_tokens: scored tokens.
        nll_sum: minus their log-probabilities, in nats.
        token_logprobs: one list a document, of the tokens that were scored, in order.
        tokens: TokenTable, one entry a scored token.
        reference_perplexity, reference_nll_sum: the same of the reference; None without one.
        settings: what was asked for, and whether the model was packed.
        seconds: of the whole.
    """

    perplexity: float
    num_tokens: int
    nll_sum: float
    token_logprobs: list[list[float]]
    tokens: TokenTable
    reference_perplexity: float | None
    reference_nll_sum: float | None
    settings: dict
    seconds: float

    def __repr__(self) -> str:
        reference = "" if self.reference_perplexity is None else f", reference {self.reference_perplexity:.6g}"
        return (
            f"ScoreResult(perplexity {self.perplexity:.6g}{reference}; {self.num_tokens} tokens of "
            f"{len(self.token_logprobs)} documents, {self.seconds:.1f} s)"
        )


def perplexity_of(nll_sum: float, count: int) -> float:
    """exp(nll_sum / count); infinity where that overflows."""
    mean = nll_sum / count
    return math.inf if mean > 700 else math.exp(mean)


def score(
    model,
    documents,
    *,
    cache_config: PagedCacheConfig | Mapping | None = None,
    max_length: int | None = None,
    stride: int | None = None,
    chunk_size: int = 64,
    batch_size: int = 8,
    reference: PagedCacheConfig | Mapping | None = None,
    progress_bar: bool = False,
    bos_token_id: int | None = None,
) -> ScoreResult:
    """Score documents through the paged cache, and compare with a second cache setting if there is one.

    Args:
        model: a causal model of transformers.
        documents: one list (or array) of token ids each; a `Corpus` brings its own.
        cache_config: PagedCacheConfig or a dict of its fields; None for the defaults.
        max_length: tokens of a window; None scores each document whole.
        stride: new tokens of each window after the first, at most `max_length`; None for `max_length`. See
            `rolling_windows`.
        chunk_size: tokens of one window in one forward.
        batch_size: windows at the same time.
        reference: another cache_config, over the same model in the same steps; `{}` is the model's own dtype.
        progress_bar: show tokens, rate and the time left on stderr.
        bos_token_id: a token that is put before every window, not scored itself. A `Corpus` says by its own policy.
    Returns:
        ScoreResult; with a reference its `tokens` hold the divergences.
    Raises:
        ValueError: a setting or a document is wrong (with its number), or there is nothing to score.
    """
    started = time.perf_counter()
    candidate, other = _config("cache_config", cache_config), None
    if reference is not None:
        other = _config("reference", reference)
    for name, value in (("chunk_size", chunk_size), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if hasattr(documents, "documents"):  # a Corpus
        if bos_token_id is None:
            bos_token_id = documents.window_bos
        documents = documents.documents
    vocab = model.get_input_embeddings().weight.shape[0]
    documents = [_checked(document, number, vocab) for number, document in enumerate(_listed(documents))]
    before = [] if bos_token_id is None else _checked([bos_token_id], "bos_token_id", vocab).tolist()
    check_window(max_length, stride, len(before))
    plan = _Plan(documents, before, max_length, stride, other is not None)
    if not plan.num_tokens:
        raise ValueError(f"nothing to score in {len(documents)} documents: each needs a token and one before it")
    _warn_of_positions(model, plan)
    configs = [candidate] if other is None else [candidate, other]
    with (
        _eval_mode(model),
        tqdm(total=plan.num_fed, unit="tok", desc="scoring", disable=not progress_bar, dynamic_ncols=True) as bar,
    ):

        def on_chunk(window: int, start: int, logits: Sequence[torch.Tensor]) -> None:
            plan.take(window, start, logits)
            bar.update(len(logits[0]))

        packed = run_windows(model, plan.fed, configs, on_chunk, chunk_size=chunk_size, batch_size=batch_size)
    settings = {
        "cache_config": candidate.to_dict(),
        "reference": None if other is None else other.to_dict(),
        "max_length": max_length,
        "stride": stride,
        "chunk_size": chunk_size,
        "batch_size": batch_size,
        "bos_token_id": bos_token_id,
        "num_windows": len(plan.fed),
        "packed": packed,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return plan.result(settings, time.perf_counter() - started)


class _Plan:
    """Which windows there are, and the table that they fill.

    Attributes:
        fed: the tokens of each window that the model gets: all but the last, which nothing is predicted from.
        num_tokens: how many are scored.
        num_fed: how many are fed.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], before: list[int], max_length, stride, has_reference: bool
    ) -> None:
        self._documents, self._num_before = documents, len(before)
        self._windows: list[tuple[int, Window]] = []
        self._first_entry: list[int] = []
        self._has_reference = has_reference
        self.fed: list[list[int]] = []
        self.num_tokens = 0
        for number, document in enumerate(documents):
            for window in rolling_windows(len(document), max_length, stride, len(before)):
                self._windows.append((number, window))
                self._first_entry.append(self.num_tokens)
                self.fed.append(before + document[window.start : window.end - 1].tolist())
                self.num_tokens += window.end - window.first_scored
        self.num_fed = sum(map(len, self.fed))
        self._table = TokenTable.empty(self.num_tokens, has_reference)
        self._num_filled = 0

    def take(self, number: int, start: int, logits: Sequence[torch.Tensor]) -> None:
        """Score the tokens that logits of positions start.. of a window predict."""
        document, window = self._windows[number]
        before = self._num_before
        # The logits at fed position p predict the window's token p + 1 - before, counted from its start.
        first = max(start, window.first_scored - window.start + before - 1)
        end = start + len(logits[0])
        if first >= end:
            return
        wanted = slice(first - start, end - start)
        index = np.arange(first, end, dtype=np.int64) + 1 - before + window.start
        targets = torch.from_numpy(self._documents[document][index])
        reference = logits[1][wanted] if self._has_reference else None
        found = compare(logits[0][wanted], targets, reference)
        at = self._first_entry[number] + int(index[0]) - window.first_scored
        entries, table = slice(at, at + len(index)), self._table
        table.document[entries], table.index[entries] = document, index
        table.position[entries] = np.arange(first, end) + 1
        for name, values in found._asdict().items():
            if values is not None:
                getattr(table, name)[entries] = values
        self._num_filled += len(index)

    def result(self, settings: dict, seconds: float) -> ScoreResult:
        if self._num_filled != self.num_tokens:
            raise AssertionError(f"{self._num_filled} of {self.num_tokens} tokens were scored")
        table, count = self._table, self.num_tokens
        nll = -math.fsum(table.logprob)
        other = -math.fsum(table.reference_logprob) if self._has_reference else None
        return ScoreResult(
            perplexity=perplexity_of(nll, count),
            num_tokens=count,
            nll_sum=nll,
            token_logprobs=[part.tolist() for part in table.by_document(len(self._documents))],
            tokens=table,
            reference_perplexity=None if other is None else perplexity_of(other, count),
            reference_nll_sum=other,
            settings=settings,
            seconds=seconds,
        )

    @property
    def longest(self) -> int:
        return max(map(len, self.fed))


def _config(name: str, given) -> PagedCacheConfig:
    if isinstance(given, Mapping) and given.get("kv_cache_dtype", "") is None:
        given = {**given, "kv_cache_dtype": "auto"}
    try:
        return PagedCacheConfig.from_any(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _listed(documents) -> list:
    if isinstance(documents, str | bytes | Mapping) or not hasattr(documents, "__iter__"):
        raise ValueError(f"documents must be lists of token ids, got {type(documents).__name__}")
    return list(documents)


def _checked(document, number: int | str, vocab: int) -> np.ndarray:
    where = number if isinstance(number, str) else f"document {number}"
    if isinstance(document, str):
        raise ValueError(f"{where} is a text; give its token ids, or use load_corpus")
    if isinstance(document, torch.Tensor):
        document = document.detach().cpu().numpy()
    array = np.asarray(document)
    if array.ndim != 1:
        raise ValueError(f"{where} must be one list of token ids, got shape {list(array.shape)}")
    if not array.size:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where}: token ids must be integers, got {array.dtype}")
    bad = array[(array < 0) | (array >= vocab)]
    if bad.size:
        raise ValueError(f"{where}: token id {int(bad[0])} is out of range, the model has {vocab} tokens")
    return array.astype(np.int64)


def _warn_of_positions(model, plan: _Plan) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and plan.longest > positions:
        warnings.warn(
            f"a window of {plan.longest} tokens is longer than the {positions} positions that the model was made for; "
            "give max_length",
            stacklevel=3,
        )


@contextlib.contextmanager
def _eval_mode(model) -> Iterator[None]:
    """No dropout while scoring."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
