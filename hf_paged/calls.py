"""One `generate`, `stream`, `agenerate` or `astream` call of a batcher: its requests, from all in to all out.

Contract: the requests of a call are made first, so that a wrong prompt is refused before anything is computed, and
queued together; whatever ends the call (a loop left early, an exception, Ctrl-C, a cancelled task) aborts what is
unfinished.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

from tqdm import tqdm

from .request import Request
from .request_output import RequestOutput

# Arguments of `add_request` that name or watch a single request.
_NOT_FOR_MANY = ("request_id",)


class Call:
    """The requests of one call.

    Args:
        batcher: where they run.
        prompts: each as `add_request` takes it.
        generation_config: one for all prompts, or a list with one for each.
        options: further arguments of `add_request`, each for all prompts or a list with one for each.
        deliver: called with each request that advanced or ended; None where only the end counts.
        needs_thread: whether the call cannot make steps itself.
    Raises:
        ValueError: an argument is wrong; nothing was queued.
    """

    def __init__(
        self,
        batcher,
        prompts: Iterable,
        generation_config,
        options: Mapping,
        deliver: Callable[[Request], None] | None = None,
        needs_thread: bool = False,
    ) -> None:
        self.batcher, self._deliver, self.needs_thread = batcher, deliver, needs_thread
        batcher.check_usable()
        self.groups = [list(group) for group in _make(batcher, prompts, generation_config, options)]
        self.requests = [request for group in self.groups for request in group]
        for request in self.requests:
            request.owner = self
        self.left = len(self.requests)

    @property
    def is_finished(self) -> bool:
        return self.left == 0

    @property
    def follows(self) -> bool:
        """Whether it wants to be told of each step, not of the end alone."""
        return self._deliver is not None

    def deliver(self, request: Request) -> None:
        """One of the requests advanced or ended."""
        if request.is_finished:
            self.left -= 1
        if self._deliver is not None:
            self._deliver(request)

    def outputs(self) -> list[RequestOutput]:
        """The last snapshots, in the order of the prompts.

        Raises:
            what a step raised that took one of the requests down.
        """
        raise_step_error(self.requests)
        return [RequestOutput(request) for request in self.requests]

    def __enter__(self) -> Call:
        self.batcher.enqueue(self.groups)
        return self

    def __exit__(self, *exception) -> None:
        for group in self.groups:
            if not all(request.is_finished for request in group):
                if self.needs_thread:  # an event loop must not wait for a forward
                    self.batcher.abort_soon(group[0].request_id)
                else:
                    self.batcher.abort(group[0].request_id)
            self.batcher.forget(group[0].request_id)

    @contextlib.contextmanager
    def progress(self, enabled: bool) -> Iterator[Callable[[], None]]:
        """A progress bar over the requests; what is yielded is called after each step."""
        if not enabled:
            yield lambda: None
            return
        start, shown = time.perf_counter(), 0.0
        with tqdm(total=len(self.requests), unit="request", file=sys.stderr, dynamic_ncols=True) as bar:

            def show() -> None:
                nonlocal shown
                now = time.perf_counter()
                if now - shown > 0.2 or self.is_finished:
                    shown = now
                    use = self.batcher.stats().utilization  # first: after it all tokens are noted
                    tokens = sum(len(request.noted_token_ids) for request in self.requests)
                    bar.n = len(self.requests) - self.left
                    bar.set_postfix_str(f"{tokens / (now - start):.0f} tokens/s, KV {use:.0%}")

            yield show


def _make(batcher, prompts: Iterable, generation_config, options: Mapping) -> Iterator[list[Request]]:
    """The requests of each prompt, with its number in what goes wrong."""
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts must be a list of prompts, got {type(prompts).__name__}; put it into a list")
    prompts = list(prompts)
    for name in _NOT_FOR_MANY:
        if options.get(name) is not None:
            raise ValueError(f"{name} names one request; give it to add_request")
    configs = _for_each("generation_config", generation_config, len(prompts))
    each = {
        # Processors and criteria come as lists, too: a list of such lists gives each prompt its own.
        name: _for_each(name, value, len(prompts), nested=name in ("logits_processor", "stopping_criteria"))
        for name, value in options.items()
    }
    for index, prompt in enumerate(prompts):
        try:
            own = {name: values[index] for name, values in each.items()}
            own["request_id"] = batcher.intake.new_id()
            yield batcher.intake.requests(prompt, generation_config=configs[index], **own)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"prompt {index}: {error}") from error


def _for_each(name: str, value, count: int, nested: bool = False) -> list:
    is_list = isinstance(value, list | tuple)
    if nested and is_list:
        is_list = len(value) > 0 and all(one is None or isinstance(one, list | tuple) for one in value)
    if not is_list:
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} is a list of {len(value)}, there are {count} prompts")
    return list(value)


def raise_step_error(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.step_error is not None:
            raise request.step_error


def submit_async(
    batcher, prompts: Iterable, generation_config, options: Mapping, ends_only: bool
) -> tuple[Call, AsyncIterator[RequestOutput]]:
    """A call whose outputs arrive in the running event loop.

    Args:
        ends_only: leave out the snapshots of requests that go on.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(request: Request) -> None:
        if request.is_finished or (not ends_only and len(request.output_token_ids) > request.delivered):
            output = RequestOutput(request)
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(queue.put_nowait, output)

    call = Call(batcher, prompts, generation_config, options, deliver, needs_thread=True)

    async def outputs() -> AsyncIterator[RequestOutput]:
        left = len(call.requests)
        while left:
            output = await queue.get()
            left -= output.finished
            yield output
        raise_step_error(call.requests)

    return call, outputs()
