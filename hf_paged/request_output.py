"""Snapshots of requests: what callers of a batcher get.

Contract: a `RequestOutput` is immutable; what it showed when it was made it shows for good, because the lists behind
it only ever grow. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .request import Request, TokenLogprobs


class RequestTimings(NamedTuple):
    """Seconds, of `time.perf_counter`; None where it has not happened yet.

    arrival: when the request was added.
    started: when its first token was first computed.
    first_token, last_token: when its first and its newest token were sampled.
    finished: when it ended.
    num_tokens: tokens sampled so far.
    """

    arrival: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_tokens: int = 0

    @property
    def queued(self) -> float | None:
        """Seconds that it waited before it was first computed."""
        return None if self.started is None else self.started - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds between two of its tokens; None before the second."""
        return (self.last_token - self.first_token) / (self.num_tokens - 1) if self.num_tokens > 1 else None


_set = object.__setattr__


class RequestOutput:
    """What one request has produced by the end of a step. Immutable; equal to any other that shows the same.

    Attributes:
        request_id: as given to, or by, `add_request`; the samples of one prompt share it.
        index: which of the prompt's `num_return_sequences` samples this is.
        prompt_token_ids: tuple of the prompt's tokens.
        output_token_ids: tuple of all tokens generated so far, the end-of-sequence token included.
        new_token_ids: those that the snapshot before this one did not have; empty while the prompt is computed.
        text: `output_token_ids` decoded without special tokens, or None without a tokenizer.
        finish_reason: None, "eos", "length", "stop" (a stop string or stopping criterion), "abort" or "error".
        error: the exception behind "error".
        logprobs: tuple of TokenLogprobs, one an output token; None unless asked for.
        prompt_logprobs: one a prompt token (None for the first, which nothing predicts); None unless asked for.
        scores, logits: tuples of `[vocab]` float32 tensors, one an output token, after and before the logits
            processors; None unless the generation config asks (`output_scores`, `output_logits`).
        num_cached_tokens: prompt tokens that were not computed because another request's blocks held them.
        timings: RequestTimings.
    """

    __slots__ = ("_first", "_last_token", "_length", "_request", "_text", "finish_reason")

    def __init__(self, request: Request, counts: bool = True) -> None:
        """A snapshot of the request; its tokens since the last one that counts become `new_token_ids`."""
        # Made for every request in every step, so it notes only what will change; the rest is read when asked for.
        length = len(request.output_token_ids)
        _set(self, "_request", request)
        _set(self, "_first", request.delivered)
        _set(self, "_length", length)
        _set(self, "_last_token", request.last_token)
        _set(self, "_text", None)
        _set(self, "finish_reason", request.finish_reason)
        if counts:
            request.delivered = length

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def index(self) -> int:
        return self._request.index

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._request.prompt_token_ids

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        return tuple(self._request.noted_token_ids[self._first : self._length])

    @property
    def error(self) -> BaseException | None:
        return self._request.error if self.finished else None

    @property
    def num_cached_tokens(self) -> int:
        return self._request.num_cached_tokens

    @property
    def timings(self) -> RequestTimings:
        request, has_tokens = self._request, self._length > 0
        return RequestTimings(
            request.arrival,
            request.started,
            request.first_token if has_tokens else None,
            self._last_token if has_tokens else None,
            request.finished if self.finished else None,
            self._length,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self._request.noted_token_ids[: self._length])

    @property
    def text(self) -> str | None:
        if self._text is None and self._request.decode is not None:
            _set(self, "_text", self._request.decode(self.output_token_ids))
        return self._text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return _first(self._request.logprobs, self._length)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if not self._length and not self.finished:
            return None  # the prompt is not computed yet
        return _first(self._request.prompt_logprobs, len(self.prompt_token_ids))

    @property
    def scores(self) -> tuple | None:
        return _first(self._request.scores, self._length)

    @property
    def logits(self) -> tuple | None:
        return _first(self._request.logits, self._length)

    def __setattr__(self, name: str, value) -> None:
        raise AttributeError(f"a RequestOutput is immutable, {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a RequestOutput is immutable, {name!r} cannot be deleted")

    def _visible(self) -> tuple:
        # Tensors are left out: they have no single truth value.
        return (
            self.request_id,
            self.index,
            self.prompt_token_ids,
            self.output_token_ids,
            self.new_token_ids,
            self.finish_reason,
            self.logprobs,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.timings,
        )

    def __eq__(self, other: object) -> bool:
        return self._visible() == other._visible() if isinstance(other, RequestOutput) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.request_id, self.index, self._length, self.finish_reason))

    def __copy__(self) -> RequestOutput:
        return self

    def __reduce__(self):
        # A deep copy and a pickle keep what is seen: neither the batcher's live lists nor a tokenizer.
        length, text = self._length, self.text
        frozen = Request(self.request_id, self.prompt_token_ids, key=-1, max_tokens=0, index=self.index)
        frozen.noted_token_ids = list(self.output_token_ids)
        frozen.delivered, frozen.num_cached_tokens = self._first, self.num_cached_tokens
        frozen.finish_reason, frozen.error = self.finish_reason, self.error
        frozen.logprobs, frozen.prompt_logprobs = self.logprobs, self.prompt_logprobs
        frozen.scores, frozen.logits = self.scores, self.logits
        timings = self.timings
        frozen.arrival, frozen.started, frozen.first_token = timings.arrival, timings.started, timings.first_token
        frozen.last_token, frozen.finished = timings.last_token, timings.finished
        return _restored, (frozen, (self._first, length, text))

    def __repr__(self) -> str:
        shown = ("index", "output_token_ids", "new_token_ids", "finish_reason")
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        text = "" if self.text is None else f", text={self.text!r}"
        return f"RequestOutput(request_id={self.request_id!r}, {fields}{text})"


def _restored(request: Request, shown: tuple) -> RequestOutput:
    output = RequestOutput(request)
    for name, value in zip(("_first", "_length", "_text"), shown, strict=True):
        _set(output, name, value)
    return output


def _first(values: Sequence | None, count: int) -> tuple | None:
    return None if values is None else tuple(values[:count])


class InvalidatedPrefix(NamedTuple):
    """What `invalidate_prefix` dropped.

    Attributes:
        block_ids: the blocks, a tuple for each group of layers; each group has a pool with numbers of its own.
        request_ids: running requests that hold one of them, or are computing such a prompt.
    """

    block_ids: tuple[tuple[int, ...], ...]
    request_ids: tuple[str, ...]
