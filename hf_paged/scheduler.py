"""Which requests take part in the next forward, with how many tokens, in which blocks.

Contract: there are no phases. Every request catches up its `num_computed_tokens` with the tokens that it has, under
one token budget: decoding requests first, then prompts in their order, in chunks, then new ones. When blocks run out,
the latest request of the lowest priority gives its own back and is computed again later. A forward that fails needs
no undoing: what is computed is counted in `update` alone, and blocks that a request already has are used next time.

Why nothing deadlocks: a request is refused when it is added unless it fits alone, and only a request that comes later
in the order ever gives way, so the first of all keeps its blocks until it ends. No torch in this file.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from .batch_blocks import BatchBlocks
from .cache_group import CacheGroup
from .config import SchedulerConfig
from .prefix_admission import PrefixAdmission
from .prefix_cache import PrefixCache
from .request import Request, RequestStatus
from .running import RunningBatch
from .scheduler_output import Prefill, SchedulerOutput


class Scheduler:
    """Waiting and running requests, and who gets blocks.

    Args:
        groups: the groups of cache layers, one at least; all of one block size.
        config: with `max_num_batched_tokens` filled in.
        prefix: what finds blocks that hold the beginning of a request already, or None.
        decode_rows: see RunningBatch.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        config: SchedulerConfig,
        prefix: PrefixCache | None = None,
        decode_rows: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.groups, self.config, self.prefix = list(groups), config, prefix
        self.block_size = groups[0].manager.block_size
        self.batch = RunningBatch(config.max_num_seqs, len(self.groups), self.block_size, decode_rows)
        self.num_preemptions = 0
        self.blocks = BatchBlocks(self.batch, self.groups, prefix)
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # a heap; finished ones are dropped when met
        self._queued: set[int] = set()  # keys of those in it that wait
        self._deferred: dict[int, tuple[Request, int]] = {}  # see PrefixAdmission.waiting
        self._seats: dict[int, int] = {}  # request key -> rows kept free for its further samples

    # Adding and ending

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError unless a request of this size fits into the pool when it is alone there."""
        stored = max(num_prompt_tokens, max_tokens - 1)  # the last token's KV is never needed
        for group in self.groups:
            need = group.blocks_for(stored)
            if need > group.max_blocks:
                raise ValueError(
                    f"a request of {num_prompt_tokens} prompt tokens and up to {max_tokens - num_prompt_tokens} new "
                    f"ones needs {need} blocks of {self.block_size} tokens, the pool has {group.max_blocks}: give the "
                    "cache more blocks (num_blocks, memory_fraction), or lower max_new_tokens"
                )

    def add(self, request: Request) -> None:
        """Put a request that fits into the queue, with its `samples`."""
        heapq.heappush(self._waiting, (request.order, request))
        self._queued.add(request.key)

    def finish(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """End a request, wherever it is, and give its blocks back; samples that have not begun end with it."""
        if request.is_finished:
            return
        if request.row >= 0:
            self._take_out(request)
        self._queued.discard(request.key)
        request.finish(reason, error)
        for sample in request.samples:
            self.finish(sample, reason, error)

    @property
    def num_waiting(self) -> int:
        return len(self._queued)

    @property
    def num_running(self) -> int:
        return self.batch.num_rows

    @property
    def has_unfinished(self) -> bool:
        return len(self._queued) > 0 or self.batch.num_rows > 0

    # A step

    def schedule(self) -> SchedulerOutput:
        """Choose what the next forward computes, and reserve its blocks."""
        output, batch = SchedulerOutput(), self.batch
        budget, native = self.config.max_num_batched_tokens, batch.native
        if batch.num_decode:
            # In most steps nothing else is to be done than this one call.
            if native is not None and batch.num_decode <= budget and (longest := native.reserve()) > 0:
                output.num_decode, output.longest = batch.num_decode, longest
            else:
                self._schedule_decode(output, budget)
            budget -= output.num_decode
        if budget and batch.num_rows > batch.num_decode:
            budget = self._schedule_prefills(output, budget)
        if budget and self._queued and batch.num_rows < batch.max_num_seqs:
            self.blocks.record_all()
            budget = self._admit(output, budget)
        output.num_tokens = self.config.max_num_batched_tokens - budget
        return output

    def update(self, output: SchedulerOutput, tokens: Sequence[int], failed: dict[int, BaseException]) -> list[Request]:
        """Count what a forward computed, and what was sampled from it.

        Args:
            output: as `schedule` returned it; nothing was scheduled, finished or added to the batch since.
            tokens: a token for each decoding row, then for each last chunk one and one for each of its samples; see
                `RunningBatch.advance`.
            failed: request key -> the exception that its sampling raised.
        Returns:
            The requests that reached an end-of-sequence token or their length; they are still running.
        """
        batch, count, ended = self.batch, output.num_decode, []
        if count:
            mine = tokens[:count] if output.prefills else tokens
            ended = [batch.requests[row] for row in batch.advance(output.decode_rows, count, mine)]
        if output.prefills:
            self._update_prefills(output, tokens[count:], ended)
        if failed:
            without_token = {prefill.request.key for prefill in output.prefills if not prefill.is_last}
            for request in [one for one in batch.requests if one.key in failed]:
                if request.key not in without_token:
                    request.output_token_ids.pop()  # it stood for the token that could not be sampled
                self.finish(request, "error", failed[request.key])
            ended = [request for request in ended if not request.is_finished]
        return ended

    def end_reason(self, request: Request) -> str:
        """Why a request that `update` returned has ended."""
        tokens = request.output_token_ids
        return "eos" if tokens and tokens[-1] in request.eos_token_ids else "length"

    def _update_prefills(self, output: SchedulerOutput, tokens: Sequence[int], ended: list[Request]) -> None:
        batch, position = self.batch, 0
        for prefill in output.prefills:
            request = prefill.request
            batch.num_computed[request.row] = computed = prefill.start + prefill.count
            if self.prefix is not None:
                self.prefix.record(request, computed, tail=computed == request.num_tokens)
            if not prefill.is_last:
                if prefill.start + prefill.count == request.num_tokens:  # it wanted no new token
                    ended.append(request)
                continue
            batch.begin_decode(request.row)  # whose next token has no block yet, or one that it covered before
            started = [request, *prefill.samples]
            if request.samples:
                self._start_samples(request, prefill.samples)
            for one, token in zip(started, tokens[position : position + len(started)], strict=True):
                one.output_token_ids.append(token)
                batch.num_tokens[one.row] += 1
                batch.last_token[one.row] = token
                if one.num_tokens >= one.max_tokens or token in one.eos_token_ids:
                    ended.append(one)
            position += len(started)

    def _start_samples(self, request: Request, seated: Sequence[Request]) -> None:
        """Start samples of a prompt on the blocks that hold it, and queue those that no row was kept for."""
        self._seats.pop(request.key, None)
        waiting, request.samples = request.samples, []
        for sample in seated:
            sample.status = RequestStatus.RUNNING
            self.blocks.fork(request, sample)
        for sample in waiting:
            if sample.status is RequestStatus.WAITING:
                self.add(sample)

    # Decoding rows

    def _schedule_decode(self, output: SchedulerOutput, budget: int) -> None:
        batch = self.batch
        if batch.num_decode > budget:
            chosen = sorted(batch.requests[: batch.num_decode], key=_order)[:budget]
            self._reserve_in_order(output, chosen)
            rows = [request.row for request in chosen if request.row >= 0]
            output.decode_rows, output.num_decode = np.array(rows, dtype=np.int64), len(rows)
            return
        if not self.blocks.extend_all():
            self._reserve_in_order(output, sorted(batch.requests[: batch.num_decode], key=_order))
        output.num_decode = batch.num_decode

    def _reserve_in_order(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Give each request its next block, the first ones at the cost of the last."""
        for request in requests:
            while request.row >= 0 and not self.blocks.extend(request):
                victim = self._victim(request, self.batch.requests)
                if victim is not None:
                    self._preempt(output, victim)
                elif self.batch.num_rows > 1:
                    self._preempt(output, request)
                else:
                    self._fail(output, request)

    # Prompts

    def _schedule_prefills(self, output: SchedulerOutput, budget: int) -> int:
        batch = self.batch
        for request in sorted(batch.requests[batch.num_decode :], key=_order):
            if not budget:
                break
            if request.row >= 0:  # else it gave way to an earlier one
                budget -= self._schedule_chunk(output, request, budget)
        return budget

    def _schedule_chunk(self, output: SchedulerOutput, request: Request, budget: int) -> int:
        """Schedule as much of a request as there are blocks for; return how many tokens that is."""
        batch = self.batch
        start = int(batch.num_computed[request.row])
        wanted = min(request.num_tokens - start, budget, self.config.chunked_prefill_size or budget)
        while True:
            count = min(wanted, self.blocks.fitting(request))
            if count > 0 and self.blocks.append(request, start + count):
                break
            # Whoever has a place in this step already keeps it: the decoding rows, and the chunks before this one.
            placed = {prefill.request.key for prefill in output.prefills}
            victim = self._victim(request, batch.requests[batch.num_decode :], placed)
            if victim is not None:
                self._preempt(output, victim)
                continue
            if batch.num_rows == 1:
                self._fail(output, request)
            return 0  # later, when those before it have given blocks back
        samples: Sequence[Request] = ()
        if start + count == request.num_tokens < request.max_tokens and request.samples:
            # They stay its own until they begin: this forward may fail.
            samples = [sample for sample in request.samples if not sample.is_finished]
            samples = samples[: self._seats.get(request.key, 0)]
        output.prefills.append(Prefill(request, start, count, samples))
        return count

    def _admit(self, output: SchedulerOutput, budget: int) -> int:
        """Start waiting requests while there are rows, tokens and blocks for them, in their order."""
        batch, waiting = self.batch, self._waiting
        chunk = min(self.config.max_num_batched_tokens, self.config.chunked_prefill_size or budget)
        promised = [self._promised(index, chunk) for index in range(len(self.groups))]
        sharing = PrefixAdmission(self.prefix, self.groups, batch.requests[batch.num_decode :], self._deferred)
        deferred: list[tuple[tuple[int, int], Request]] = []
        while budget and waiting:
            request = waiting[0][1]
            if request.is_finished:
                heapq.heappop(waiting)
                continue
            seats = min(len(request.samples), batch.max_num_seqs - 1)
            if batch.num_rows + sum(self._seats.values()) + 1 + seats > batch.max_num_seqs:
                break
            if sharing.still_waits(request):
                deferred.append(heapq.heappop(waiting))
                continue
            hit = sharing.match(request)
            if sharing.waits(request, hit):
                deferred.append(heapq.heappop(waiting))
                continue
            # All of its tokens must fit beside what the running ones will need, or it would only take turns with them.
            if batch.num_rows and any(
                sharing.need(index, request, hit, chunk) + promised[index] > group.available_blocks
                for index, group in enumerate(self.groups)
            ):
                break
            heapq.heappop(waiting)
            self._queued.discard(request.key)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, 0
            self.blocks.start(request, hit)
            if hit is not None and request.started is None:
                request.num_cached_tokens = int(batch.num_computed[request.row])
            if seats:
                self._seats[request.key] = seats
            budget -= self._schedule_chunk(output, request, budget)
            if request.row >= 0:
                promised = [blocks + self.blocks.owed(index, request, chunk) for index, blocks in enumerate(promised)]
                sharing.note(request)
        self._deferred = sharing.waiting
        for entry in deferred:
            heapq.heappush(waiting, entry)
        return budget

    def _promised(self, index: int, chunk: int) -> int:
        """Blocks for the rest of the prompts under way, and for the decoding rows' next step."""
        batch = self.batch
        under_way = sum(self.blocks.owed(index, request, chunk) for request in batch.requests[batch.num_decode :])
        return under_way + -(-batch.num_decode // self.block_size)

    # Giving blocks back

    def _victim(self, request: Request, among: Sequence[Request], spared: Set[int] = frozenset()) -> Request | None:
        """Who gives way to a request: the last in the order of those that come after it."""
        later = [one for one in among if one.order > request.order and one.key not in spared]
        return max(later, key=_order, default=None)

    def _preempt(self, output: SchedulerOutput, request: Request) -> None:
        self._take_out(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.add(request)
        self.num_preemptions += 1
        output.preempted.append(request)

    def _fail(self, output: SchedulerOutput, request: Request) -> None:
        """End a request that does not fit although it is alone: the pool turned out smaller than it was to be."""
        group = max(self.groups, key=lambda group: group.blocks_for(request.num_tokens) - group.max_blocks)
        error = RuntimeError(
            f"request {request.request_id!r} of {request.num_tokens} tokens needs "
            f"{group.blocks_for(request.num_tokens)} blocks of {self.block_size} tokens and there can be "
            f"{group.max_blocks}: the device has less memory than when the batcher was made; run shorter requests"
        )
        self.finish(request, "error", error)
        output.failed += [request, *request.samples]

    def _take_out(self, request: Request) -> None:
        self.blocks.free(request)
        self._seats.pop(request.key, None)

    def recover(self, live: Iterable[Request]) -> None:
        """Begin anew after something cut a step off half-way: all blocks are free, and requests are computed again.

        Args:
            live: every unfinished request, samples that have not begun included.
        """
        self.blocks.reset()
        self._seats.clear()
        self._deferred.clear()
        self._queued.clear()
        self._waiting.clear()
        live = list(live)
        attached = {sample.key for request in live for sample in request.samples}
        for request in live:
            request.row, request.num_computed_tokens = -1, 0
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
            if request.key not in attached:
                self.add(request)

    def settle(self) -> None:
        """Have block managers and requests know what the latest steps took and sampled."""
        self.batch.note_tokens()
        for group in self.groups:
            group.settle()

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless arrays, block tables and pools agree. Slow."""
        self.blocks.check_integrity()
        live = {request.key for _, request in self._waiting if not request.is_finished}
        if live != self._queued:
            raise AssertionError(f"requests {live} wait, {self._queued} are counted")


def _order(request: Request) -> tuple[int, int]:
    return request.order
