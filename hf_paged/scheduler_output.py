"""What a scheduler says of one step.

Contract: plain data; `Scheduler.schedule` makes it, and nobody changes it afterwards. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .request import Request


class Prefill:
    """A chunk of one request's tokens.

    Attributes:
        is_last: whether its last token is the newest that the request has, so that the next one is sampled.
        samples: further samples of the prompt, which begin with this chunk.
    """

    __slots__ = ("count", "is_last", "request", "samples", "start")

    def __init__(self, request: Request, start: int, count: int, samples: Sequence[Request] = ()) -> None:
        self.request, self.start, self.count, self.samples = request, start, count, samples
        self.is_last = start + count == request.num_tokens < request.max_tokens


class SchedulerOutput:
    """What one forward computes: a token each of the decoding rows, and chunks of prompts.

    Attributes:
        num_decode: decoding rows that take part.
        decode_rows: which they are, `[num_decode]` int64; None for rows 0 to num_decode - 1.
        prefills: the chunks, in the order in which they are packed.
        num_tokens: tokens in all.
        longest: largest length of a decoding row with its token of this step; 0 where that is not known.
        preempted, failed: requests that lost their blocks, and that cannot go on at all.
    """

    __slots__ = ("decode_rows", "failed", "longest", "num_decode", "num_tokens", "preempted", "prefills")

    def __init__(self) -> None:
        self.num_decode = self.num_tokens = self.longest = 0
        self.decode_rows: np.ndarray | None = None
        self.prefills: list[Prefill] = []
        self.preempted: list[Request] = []
        self.failed: list[Request] = []

    @property
    def num_seqs(self) -> int:
        return self.num_decode + len(self.prefills)
