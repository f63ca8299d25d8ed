"""What every method of a batcher stands on: its requests by name, one step and who is told of it, failure, the end.

Contract: `_lock` is held during a step, `_names` only while ids are given and requests queued, so that queueing never
waits for a forward. A step's exception takes down the requests that somebody waits for, who then raise it; the others
stay as they were before the step.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .config import PagedCacheConfig, SchedulerConfig
from .driving import Background, Drivers
from .engine import Engine
from .intake import Intake
from .model_runner import ModelRunner
from .packing import packing_plan
from .prefix_cache import BlockEvent
from .request import Request
from .switch import switches

logger = logging.get_logger(__name__)

# Results of requests that no call waits for are kept until so many others have ended.
MAX_KEPT = 4096


class BatcherCore:
    """The inside of a ContinuousBatcher, whose arguments it takes."""

    def __init__(
        self,
        model,
        tokenizer,
        cache_config: PagedCacheConfig | Mapping | None,
        scheduler_config: SchedulerConfig | Mapping | None,
        generation_config: GenerationConfig | Mapping | None,
        on_event: Callable[[str, str | BlockEvent], None] | None,
        compile: bool | str = False,
    ) -> None:
        self.model, self.tokenizer, self._on_event = model, tokenizer, on_event
        self.cache_config = PagedCacheConfig.from_any(cache_config)
        config = SchedulerConfig.from_any(scheduler_config)
        plan = packing_plan(model)
        self.scheduler_config = config.for_device(plan.input_device.type)
        runner = ModelRunner(model, plan, self.cache_config, self.scheduler_config, compile)
        self._engine = Engine(runner, lambda kind, request: self._tell(kind, request.request_id))
        if on_event is not None and runner.scheduler.prefix is not None:
            runner.scheduler.prefix.on_event = lambda kind, event: self._tell_block(f"block_{kind}", event)
        self.intake = Intake(model, tokenizer, plan, runner.scheduler, generation_config)
        self.intake.template()  # a wrong default is refused here, not at the first request
        self._lock = threading.RLock()
        self._names = threading.Lock()
        self._arrivals: collections.deque[Request] = collections.deque()
        self._requests: dict[str, list[Request]] = {}  # by id, unfinished ones and those kept
        self._kept: collections.deque[str] = collections.deque()  # ids that ended without an owner, oldest first
        self._unreported: dict[int, Request] = {}  # advanced by steps that were not step()'s
        self._to_abort: list[Request] = []  # asked for by a callback of the step that runs, or from an event loop
        self._num_followed = 0  # live requests of which somebody is told after each step
        self._stepping = self._closed = False
        self._background: Background | None = None
        self.drivers = Drivers(self._drive, lambda: switches.switched(self.model), self._has_background)

    def read_weights(self) -> None:
        """Have the next step compare all weights with those that computed what can be found."""
        self._engine.reads_weights = True

    # Requests by name

    def enqueue(self, groups: Iterable[list[Request]]) -> None:
        """Queue requests, each with its samples.

        Raises:
            ValueError: an unfinished request has the same id; nothing is queued.
            RuntimeError: the batcher is closed.
            what a step of the background thread raised, until `start` is called again.
        """
        groups = list(groups)
        with self._names:
            self.check_usable()
            for requests in groups:
                known = self._requests.get(requests[0].request_id)
                if known is not None and not all(one.is_finished for one in known):
                    raise ValueError(f"request_id {requests[0].request_id!r} is that of an unfinished request")
            for requests in groups:
                self._requests[requests[0].request_id] = requests
                self._arrivals.append(requests[0])
        for requests in groups:
            self._tell("added", requests[0].request_id)
        if self._background is not None:
            self._background.wake()
        self.drivers.tell()

    def forget(self, request_id: str) -> None:
        """Keep nothing of an ended request."""
        self._requests.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._arrivals or self._to_abort) or self._engine.has_unfinished

    def check_usable(self) -> None:
        """Raise RuntimeError if the batcher is closed, and what a step of the background thread raised."""
        self._check_open()
        background = self._background
        if background is not None and background.error is not None:
            raise background.error

    def _has_background(self) -> bool:
        background = self._background
        return background is not None and background.is_running

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this batcher is closed; make a new one")

    def _take_arrivals(self) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            for one in (request, *request.samples):
                one.is_followed = one.owner is None or one.owner.follows or one.streamer is not None
                self._num_followed += one.is_followed
            self._engine.add(request)

    def _finish(self, requests: Iterable[Request], reason: str, error: BaseException | None = None) -> None:
        """End requests between two steps, and tell those who wait."""
        for request in requests:
            if not request.is_finished:
                self._engine.finish(request, reason, error)
        self._deliver([], self._engine.ended(), by_step=False)

    # Steps

    def _advance(self, by_step: bool = True) -> list[Request]:
        """One step; return the requests that advanced or ended, some of them twice."""
        self._check_open()
        self._check_not_inside()
        self._take_arrivals()
        self._abort_those_asked_for()
        self._stepping = True
        try:
            advanced, ended = self._engine.step()
        finally:
            self._stepping = False
            self._abort_those_asked_for()
        self._engine.times.begin_outputs()
        self._deliver(advanced, ended, by_step)
        return advanced + ended

    def abort_soon(self, request_id: str) -> None:
        """Abort a request with the next step, without waiting for the one that may be running."""
        with self._names:
            self._to_abort += [one for one in self._requests.get(request_id, ()) if not one.is_finished]
            background = self._background
        if background is not None:
            background.wake()

    def _abort_those_asked_for(self) -> None:
        if self._to_abort:
            with self._names:
                asked, self._to_abort = self._to_abort, []
            self._take_arrivals()
            self._finish(asked, "abort")

    def _check_not_inside(self) -> None:
        if self._stepping:
            raise RuntimeError("a callback of a request asks, inside a step, for another step")

    def _drive(self) -> None:
        """One step for those who wait. What it raises, everyone who waits gets."""
        with self._lock:
            self._check_not_inside()
            try:
                self._advance(by_step=False)
                self._engine.times.end_outputs()
            except Exception as error:
                background = self._background
                in_background = background is not None and background.is_current
                if in_background:
                    background.error = error  # first: who is told of it may ask for the next request at once
                self._fail(error, all_of_them=in_background)
                raise

    def fail_all(self, error: BaseException) -> None:
        """Take every request down: a step of the background thread raised."""
        with self._lock:
            self._take_arrivals()
            self._fail(error, all_of_them=True)
        self.drivers.tell()

    def _fail(self, error: BaseException, all_of_them: bool) -> None:
        fallen = [one for one in self._engine.live.values() if all_of_them or one.owner is not None or one.awaited]
        for request in fallen:
            request.step_error = error
        self._finish(fallen, "error", error)

    def _deliver(self, advanced: Iterable[Request], ended: Iterable[Request], by_step: bool) -> None:
        """Tell those who wait for a request what it has become."""
        if self._num_followed:
            for request in advanced:
                if request.is_followed and not request.is_finished:
                    self._tell_of(request, by_step)
        for request in ended:
            self._num_followed -= request.is_followed
            self._tell_of(request, by_step)

    def _tell_of(self, request: Request, by_step: bool) -> None:
        if not request.is_finished and request.output_token_ids:
            request.last_token = self._engine.now
        if request.streamer is not None:
            self._stream_to(request)
        if request.owner is not None:
            request.owner.deliver(request)
            return
        if not by_step:
            self._unreported[request.key] = request
        if request.is_finished:
            self._keep(request)

    def _stream_to(self, request: Request) -> None:
        streamer = request.streamer
        try:
            if not request.streamed and (request.output_token_ids or request.is_finished):
                streamer.put(torch.tensor([request.prompt_token_ids]))
                request.streamed = 1  # the prompt, and then a token each
            for token in request.output_token_ids[request.streamed - 1 :] if request.streamed else ():
                request.streamed += 1
                streamer.put(torch.tensor([token]))
            if request.is_finished:
                request.streamer = None
                streamer.end()
        except Exception as error:
            request.streamer = None
            if not request.is_finished:
                self._engine.finish(request, "error", error)  # the next step reports it
            logger.warning(f"the streamer of request {request.request_id!r} raised {error!r}")

    def _keep(self, request: Request) -> None:
        """Keep the result of a request that ended, and let the oldest of too many go."""
        requests = self._requests.get(request.request_id)
        if requests is None or request is not requests[-1] and not all(one.is_finished for one in requests):
            return
        self._kept.append(request.request_id)
        while len(self._kept) > MAX_KEPT:
            oldest = self._kept.popleft()
            if all(one.is_finished for one in self._requests.get(oldest, ())):
                self.forget(oldest)

    def _tell(self, kind: str, request_id: str) -> None:
        logger.debug(f"{kind}: request {request_id!r}")
        if self._on_event is not None:
            try:
                self._on_event(kind, request_id)
            except Exception as error:
                logger.warning(f"on_event raised {error!r} for {kind!r} of request {request_id!r}")

    def _tell_block(self, kind: str, event: BlockEvent) -> None:
        try:
            self._on_event(kind, event)
        except Exception as error:
            logger.warning(f"on_event raised {error!r} for {kind!r} of {event}")

    # The end

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._check_not_inside()
            self._take_arrivals()
            self._finish([one for requests in list(self._requests.values()) for one in requests], "abort")
            with self._names:
                self._closed = True
            self._engine.release()
            self.model = None
            self.intake.release()
        self.drivers.tell()
