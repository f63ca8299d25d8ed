"""The requests of a batcher.

Contract: a `Request` is the batcher's own and changes with every step; its lists of tokens and of what is recorded
with them only ever grow (see `RequestOutput`, which relies on that). The newest output tokens of a running request may
still lie in its batch; `output_token_ids` fetches them and is read with the batcher's lock held, `noted_token_ids`
needs none. No torch in this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple


class RequestStatus(Enum):
    """Where a request is: WAITING -> RUNNING -> FINISHED, with PREEMPTED (its blocks were needed) in between."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model's own distribution (before any logits processor).

    token_id, logprob: the token that stands there, and its own.
    top: the most likely (token_id, logprob) pairs, as many as were asked for, the best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Request:
    """One sequence that the batcher generates: a prompt, what was sampled so far, and how far its KV is computed.

    Args:
        request_id: the caller's name for it; the samples of one prompt share it.
        prompt_token_ids: at least one token.
        key: unique and rising with the order of arrival.
        max_tokens: prompt and output together never get longer.
        eos_token_ids: tokens that end it.
        priority: the lower number is served first.
        index: which of the prompt's samples this is.
        sampling: what the sampler keeps for it.
        checks_stop: whether it has stopping criteria beyond length and `eos_token_ids`.
        adapter_name: the adapter that its tokens are computed with; None for what is active on the model.

    Attributes:
        num_computed_tokens: tokens whose KV is written. While it runs, the scheduler's arrays are ahead of this.
        noted_token_ids: its output, perhaps without the tokens of the latest steps; can be read at any time.
        row: its row in the running batch, -1 while it does not run.
        batch: the running batch that it has a row in, or None.
        is_plain: whether its next token is just the most likely one.
        prefix_node: the findable block (see `prefix_tree`) behind which its next one is recorded; None where it is not.
        samples: further samples of this prompt, which begin when the prompt is computed.
        owner: the `generate` or `stream` call that it belongs to, or None.
        is_followed: whether somebody is told of each of its steps.
        awaited: whether somebody waits for its result.
        step_error: the exception of a step that took it down.
        delivered: output tokens that snapshots have shown as new.
    """

    __slots__ = (
        "adapter_name",
        "arrival",
        "awaited",
        "batch",
        "cache_salt",
        "checks_stop",
        "decode",
        "delivered",
        "eos_token_ids",
        "error",
        "finish_reason",
        "finished",
        "first_token",
        "index",
        "is_followed",
        "is_plain",
        "key",
        "last_token",
        "logits",
        "logprobs",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "order",
        "prefix_node",
        "noted_token_ids",
        "owner",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "row",
        "samples",
        "sampling",
        "scores",
        "started",
        "status",
        "step_error",
        "streamed",
        "streamer",
        "wants_prompt_logits",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        key: int,
        max_tokens: int,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        index: int = 0,
        sampling: Any = None,
        checks_stop: bool = False,
        cache_salt: str | None = None,
        adapter_name: str | None = None,
    ) -> None:
        self.request_id, self.index, self.key = request_id, index, key
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.noted_token_ids: list[int] = []
        self.max_tokens = max_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self.priority = priority
        self.order = (priority, key)
        self.sampling, self.checks_stop = sampling, checks_stop
        self.cache_salt, self.adapter_name = cache_salt, adapter_name
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.prefix_node: Any = None
        self.row = -1
        self.batch: Any = None
        self.samples: list[Request] = []
        self.owner: Any = None
        self.awaited = self.is_followed = False
        self.step_error: BaseException | None = None
        self.streamer: Any = None
        self.streamed = 0  # what the streamer has got: 1 for the prompt, and then each token
        self.delivered = 0
        self.wants_prompt_logits = False
        self.is_plain = False
        # What the caller asked to keep of each token; None where it did not.
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.scores: list | None = None
        self.logits: list | None = None
        self.decode: Callable[[Sequence[int]], str] | None = None
        self.arrival = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finished: float | None = None

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt_token_ids)}+{len(self.noted_token_ids)} tokens"
        return f"Request({self.request_id!r}, index={self.index}, {self.status.value}, {tokens})"

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far; changes the batch, so only for who holds the batcher's lock."""
        batch = self.batch
        if batch is not None and batch.num_recent:
            batch.note_tokens()
        return self.noted_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def tokens(self, first: int, last: int) -> list[int]:
        """Tokens `first` up to `last` of prompt and output together."""
        length = len(self.prompt_token_ids)
        if last <= length:
            return list(self.prompt_token_ids[first:last])
        output = self.output_token_ids
        if first >= length:
            return output[first - length : last - length]
        return [*self.prompt_token_ids[first:], *output[: last - length]]

    def token_tuple(self, first: int, last: int) -> tuple[int, ...]:
        """The same as a tuple, which costs nothing but the copy where it is all prompt."""
        if last <= len(self.prompt_token_ids):
            return self.prompt_token_ids[first:last]
        return tuple(self.tokens(first, last))

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End it: "eos", "length", "stop", "abort" or "error"."""
        self.status, self.finish_reason, self.error = RequestStatus.FINISHED, reason, error
        self.finished = time.perf_counter()
