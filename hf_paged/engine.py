"""One step of a batcher after another: schedule, forward, sample, update.

Contract: single-threaded; whoever calls it holds the batcher's lock. A step either counts completely or not at all:
after an exception every request is as it was before the step, and the step can be tried again. What goes wrong in one
request's own processors, criteria or callbacks ends that request alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from .adapters import Adapters, StepPart, split
from .model_runner import ModelRunner
from .packed_metadata import PackedStep, PackingError
from .packing import packing_plan
from .request import Request
from .request_output import InvalidatedPrefix
from .sampler import sample, sample_best, sampling_requests, stops
from .scheduler_output import SchedulerOutput
from .stats import BatcherStats, StepTimes
from .weights import WeightsWatch


class Engine:
    """The running batch of one model.

    Args:
        runner: the model over its pools, with the scheduler.
        notify: called with (kind, request) when a request is "preempted" or "finished".

    Attributes:
        live: request key -> request, of all that have not ended.
        now: when the tokens of the last step were there.
    """

    def __init__(self, runner: ModelRunner, notify: Callable[[str, Request], None]) -> None:
        self.runner, self.scheduler, self._notify = runner, runner.scheduler, notify
        self.adapters = Adapters(runner.model)
        self.prefix = self.scheduler.prefix
        self._weights = None if self.prefix is None else WeightsWatch(runner.model)
        self._checks_scales = False  # whether scales may have been measured on other weights than those now
        self._autocast: tuple | None = None  # the same weights give other keys and values in another precision
        self.reads_weights = True  # whether the next step compares all weights, not only what shows at a glance
        self.times = StepTimes()
        self.live: dict[int, Request] = {}
        self._ended: list[Request] = []  # ended outside of a step, and not reported by one yet
        self.now = time.perf_counter()
        self._num_checking = 0  # live requests with further stopping criteria
        self._num_adapted = 0  # and with an adapter of their own
        self._inside = False
        self._torn = False  # whether something (Ctrl-C) cut off what must be done as a whole

    def add(self, request: Request) -> None:
        """Queue a request and its samples."""
        with self._whole():
            for one in (request, *request.samples):
                self.live[one.key] = one
                self._num_checking += one.checks_stop
                self._num_adapted += one.adapter_name is not None
            if request.max_tokens <= request.num_tokens and not request.wants_prompt_logits:
                self._finish(request, "length")
            else:
                self.scheduler.add(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.live or self._ended)

    def finish(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """End a request, and samples that wait for it; the next step reports them."""
        with self._whole():
            self._finish(request, reason, error)

    def _finish(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        self.scheduler.finish(request, reason, error)
        for one in (request, *request.samples):
            self._note_end(one)

    def _note_end(self, request: Request) -> None:
        if self.live.pop(request.key, None) is not None:
            self._num_checking -= request.checks_stop
            self._num_adapted -= request.adapter_name is not None
            self.reads_weights |= not self.live
            request.last_token = self.now if request.output_token_ids else None
            self._ended.append(request)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Do something that would leave bookkeeping torn if it were cut off."""
        if self._inside:  # a callback of the step that runs
            yield
            return
        if self._torn:
            self._recover()
        self._torn = self._inside = True
        try:
            yield
            self._torn = False
        finally:
            self._inside = False

    def _recover(self) -> None:
        for request in self.live.values():
            for record in (request.logprobs, request.scores, request.logits):
                if record is not None:
                    # Of the step that was cut off, the token is there without its record, or the other way round.
                    del request.output_token_ids[len(record) :]
                    del record[len(request.output_token_ids) :]
        self.scheduler.recover(self.live.values())
        for request in list(self.live.values()):
            if request.output_token_ids and request.output_token_ids[-1] in request.eos_token_ids:
                self._finish(request, "eos")
            elif request.num_tokens >= request.max_tokens and not request.wants_prompt_logits:
                self._finish(request, "length")
        self._torn = False

    def step(self) -> tuple[list[Request], list[Request]]:
        """Run one step.

        Returns:
            The requests that advanced, and those that ended, in this step or since the one before.
        """
        if self._num_adapted:
            self._admit_adapters()
        if self._weights is not None and self.scheduler.has_unfinished:
            self._notice_weights()
        with self._whole():
            output, step = self._prepare()
        if step is None:
            return [], self.ended()
        with self.adapters.fixed():
            by_adapter = isinstance(step, list)
            logits = self.adapters.forward(self.runner, step) if by_adapter else self.runner.forward(step)
        self.times.mark("forward")
        with self._whole():
            # As generate does where the last layers lie elsewhere: histories and generators are where the input is.
            advanced = self._count(output, logits.to(self.runner.plan.input_device))
        return advanced, self.ended()

    def ended(self) -> list[Request]:
        """The requests that ended since the last call; they let go of what they sampled with."""
        ended, self._ended = self._ended, []
        if not self.live and self._weights is not None:
            self._weights.rest()  # what replaces weights while nothing runs must not have the old ones kept
        for request in ended:
            request.sampling = None
            self._notify("finished", request)
        return ended

    def _notice_weights(self) -> None:
        """Have nothing found any more that other weights computed, and no scales used that others were measured on.

        Raises:
            ValueError: the cache's fixed scales are not of these weights; no step runs until they are.
        """
        reads, self.reads_weights = self.reads_weights, False  # before reading: another thread may ask meanwhile
        try:
            changed = self._weights.check_fingerprint() if reads else self._weights.check()
        except BaseException:
            self.reads_weights |= reads
            raise
        device = self.runner.plan.input_device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if changed or autocast != self._autocast:
            self._autocast = autocast
            with self._whole():
                self.prefix.reset()
            self._checks_scales = changed and self.runner.pools.kv_scales is not None
        if self._checks_scales:
            self.runner.pools.kv_scales.check(self.runner.model)
            self._checks_scales = False

    def _admit_adapters(self) -> None:
        """End the requests whose adapter cannot be used, or not any more; try those that are new."""
        runner = self.runner
        for name in {request.adapter_name for request in self.live.values()} - {None}:
            try:
                self.adapters.admit(name, runner.plan, lambda: packing_plan(runner.model))
            except (ValueError, PackingError) as error:
                for request in [one for one in self.live.values() if one.adapter_name == name]:
                    self.finish(request, "error", error)

    def _prepare(self) -> tuple[SchedulerOutput | None, PackedStep | list[StepPart] | None]:
        if not self.scheduler.has_unfinished:
            return None, None
        self.runner.copy_blocks()  # of a step that failed before it made them
        self.times.begin()
        output = self.scheduler.schedule()
        for request in output.preempted:
            self._notify("preempted", request)
        for request in output.failed:
            self._note_end(request)
        if not output.num_tokens:
            return output, None
        for prefill in output.prefills:
            for one in (prefill.request, *prefill.samples):
                one.started = one.started or time.perf_counter()
        if self._num_adapted:
            step = split(output, self.scheduler.batch.requests)
        else:
            step = self.runner.prepare(output)
        self.times.mark("schedule")
        return output, step

    def _count(self, output: SchedulerOutput, logits: torch.Tensor) -> list[Request]:
        """Sample, and count what was computed and sampled."""
        times, batch = self.times, self.scheduler.batch
        requests = sampling_requests(output, batch.requests)
        is_plain = not output.prefills and output.decode_rows is None and bool(batch.is_plain[: len(requests)].all())
        with torch.no_grad():
            sampled = sample_best(requests, logits) if is_plain else sample(output, requests, logits)
        times.mark("sample")
        ended = self.scheduler.update(output, sampled.tokens, sampled.failed)
        times.mark("update")
        sampled.commit()
        self.now = time.perf_counter()
        advanced = requests
        if output.prefills:
            advanced = requests + [prefill.request for prefill in output.prefills if not prefill.is_last]
            for request in requests[output.num_decode :]:
                request.first_token = request.first_token or self.now
        if sampled.failed:
            for request in advanced:
                if request.is_finished:
                    for one in (request, *request.samples):
                        self._note_end(one)
        self._end(requests, {request.key: (request, self.scheduler.end_reason(request)) for request in ended})
        times.end(len(requests), output.num_tokens - len(requests), output.num_seqs)
        return advanced

    def _end(self, requests: list[Request], ended: dict[int, tuple[Request, str]]) -> None:
        """End the requests of `ended`, and those that one of their further stopping criteria ends."""
        if self._num_checking:
            for request in requests:
                if not request.checks_stop or request.is_finished:
                    continue
                if request.key in ended and ended[request.key][1] == "eos":
                    continue
                try:
                    with torch.no_grad():
                        if stops(request, self.runner.plan.input_device):
                            ended[request.key] = (request, "stop")
                except Exception as error:
                    ended.pop(request.key, None)
                    self._finish(request, "error", error)
        for request, reason in ended.values():
            self._finish(request, reason)

    def invalidate(self, tokens: list[int] | None, block: int | None, group: int) -> InvalidatedPrefix:
        """Make blocks unfindable: those of tokens, one and what lies behind it, or all.

        ValueError for a block or group that does not exist; RuntimeError from a callback of the step that runs.
        """
        if self._inside:  # half of what this would change may be in hand
            raise RuntimeError(
                "a callback asks, inside a step, to drop prefixes; do that between two steps or from another thread"
            )
        if self.prefix is None:
            return InvalidatedPrefix((), ())
        if block is not None:
            groups = self.scheduler.groups
            if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < len(groups):
                raise ValueError(f"group {group!r} is out of range, the model has {len(groups)} groups of layers")
            with self._whole():
                self.scheduler.settle()
            groups[group].manager.ref_count(block)
        with self._whole():
            if tokens is None is block:
                gone = self.prefix.reset()
            else:
                gone = self.prefix.invalidate(tokens, block, group, self.scheduler.batch.requests)
        ids = dict.fromkeys(self.live[key].request_id for key in sorted(gone.request_keys))
        return InvalidatedPrefix(gone.block_ids, tuple(ids))

    def release(self) -> None:
        """Let go of model, pools and everything else; only `stats` is left, as it is now."""
        self._last_stats = self.stats()
        self.runner = self.scheduler = self.adapters = self.prefix = self._weights = None

    def stats(self) -> BatcherStats:
        """What the pools hold and how the steps went."""
        if self.runner is None:
            return self._last_stats
        with self._whole():
            self.scheduler.settle()
        runner = self.runner
        return BatcherStats.of(runner.pools, self.scheduler, self.times, runner.graph_steps, runner.compiled_steps)

    def check_integrity(self) -> None:
        """Assert that requests, block tables and pools agree. Slow."""
        if self.runner is None:
            return
        with self._whole():
            self.scheduler.settle()
        self.scheduler.check_integrity()
        known = {request.key for _, request in self.scheduler._waiting if not request.is_finished}
        known |= {request.key for request in self.scheduler.batch.requests}
        known |= {one.key for request in self.live.values() for one in request.samples if not one.is_finished}
        if known != set(self.live):
            raise AssertionError(f"requests {sorted(self.live)} are live, the scheduler has {sorted(known)}")
