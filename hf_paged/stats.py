"""What a cache holds and what a batcher does, in numbers.

Contract: plain immutable figures, read from the pools when asked for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Blocks and bytes of a cache, summed over its pools (one pool a group of layers with one shape).

    Attributes:
        blocks_total: blocks that the pools have.
        blocks_used: blocks that somebody holds, this cache or one forked from it.
        blocks_held: blocks that this cache holds, a shared one counted once.
        bytes_total: bytes of the K/V tensors, scales of 8-bit ones included here and below.
        bytes_held: bytes of the blocks that this cache holds.
        bytes_of_tokens: bytes of the tokens in those blocks.
        num_layers: layers that own K/V in blocks.
    """

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_held: int = 0
    bytes_total: int = 0
    bytes_held: int = 0
    bytes_of_tokens: int = 0
    num_layers: int = 0

    @property
    def utilization(self) -> float:
        """Share of the pools' blocks that somebody holds, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    @property
    def waste(self) -> float:
        """Share of the held blocks' bytes that hold no token, 0 to 1."""
        return 1 - self.bytes_of_tokens / self.bytes_held if self.bytes_held else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple:
        return tuple(vars(self).values())

    @classmethod
    def of(cls, pool, rows) -> CacheStats:
        """Figures of one pool and of the rows (or None) that a cache has in it."""
        manager = pool.manager
        num_layers = len(pool.layers)
        held = len(rows.held_blocks()) if rows is not None else 0
        tokens = rows.stored_tokens() if rows is not None else 0
        layer_bytes = pool.block_bytes * num_layers
        return cls(
            blocks_total=manager.num_blocks,
            blocks_used=manager.num_blocks - manager.available_blocks,
            blocks_held=held,
            bytes_total=sum(tensor.untyped_storage().nbytes() for tensor in pool.storages()),
            bytes_held=held * layer_bytes,
            bytes_of_tokens=tokens * layer_bytes // pool.block_size,
            num_layers=num_layers,
        )


class StepTimes:
    """How long the parts of a batcher's steps took, in sums and in a window of the latest steps."""

    WINDOW = 200

    def __init__(self) -> None:
        self.seconds = {"schedule": 0.0, "forward": 0.0, "sample": 0.0}
        self.steps = self.new_tokens = self.prompt_tokens = self.sequences = 0
        # Thread CPU microseconds of each step: of schedule, metadata and update, and of telling who waits.
        self.bookkeeping: deque[float] = deque(maxlen=self.WINDOW)
        self.outputs: deque[float] = deque(maxlen=self.WINDOW)
        self._cpu = self._cpu_at = self._outputs_at = 0

    def begin(self) -> None:
        self._at, self._cpu_at, self._cpu = time.perf_counter(), time.thread_time_ns(), 0

    def mark(self, part: str) -> None:
        """The part of the step that ends now was "schedule", "forward", "sample" or "update"."""
        cpu, now = time.thread_time_ns(), time.perf_counter()
        self.seconds["schedule" if part == "update" else part] += now - self._at
        if part in ("schedule", "update"):
            self._cpu += cpu - self._cpu_at
        self._at, self._cpu_at = time.perf_counter(), time.thread_time_ns()

    def end(self, new_tokens: int, prompt_tokens: int, sequences: int) -> None:
        self.steps += 1
        self.new_tokens += new_tokens
        self.prompt_tokens += prompt_tokens
        self.sequences += sequences
        self.bookkeeping.append(self._cpu / 1000)

    def begin_outputs(self) -> None:
        self._outputs_at = time.thread_time_ns()

    def end_outputs(self) -> None:
        self.outputs.append((time.thread_time_ns() - self._outputs_at) / 1000)


@dataclass(frozen=True)
class BatcherStats:
    """What a ContinuousBatcher holds and has done.

    Attributes:
        blocks_total, blocks_used, blocks_cached: blocks of all pools: that there are, that running requests hold, and
            that nobody holds but whose content can be found again.
        blocks_limit: blocks that the pools may grow to.
        bytes_total: bytes of the K/V tensors, scales of 8-bit ones included.
        utilization: `blocks_used / blocks_total`, 0 to 1.
        waste: share of the held blocks' slots that hold no token, 0 to 1; times 100 the internal waste in percent.
        preemptions: how often a request gave its blocks back and was computed again.
        running, waiting: requests now.
        batch_occupancy: mean number of sequences in a step as a share of `max_num_seqs`.
        steps: forwards so far.
        new_tokens, prompt_tokens: tokens sampled, and other tokens computed (recomputed ones included).
        schedule_seconds, forward_seconds, sample_seconds: where the time of all steps went; bookkeeping is "schedule".
        bookkeeping_us: median thread CPU microseconds a step for schedule, metadata and update, of the last 200 steps.
        outputs_us: the same for what comes behind it: the tokens handed to those requests of which somebody is told in
            each step, their RequestOutputs built, streamers and callbacks called.
        tokens_per_second: `new_tokens` by the time of all steps.
        graph_steps: steps that were replayed from CUDA graphs.
        compiled_steps: steps that ran through torch.compile, those captured as graphs not counted.
        prefix_hit_rate: share of the tokens of the requests that began which were found in blocks, 0 to 1.
        prefix_hit_tokens: those tokens.
        prefix_evictions, prefix_invalidations: blocks that could be found and were needed for something else, and
            that were made unfindable.
    """

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_limit: int = 0
    bytes_total: int = 0
    utilization: float = 0.0
    waste: float = 0.0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    batch_occupancy: float = 0.0
    steps: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    bookkeeping_us: float = 0.0
    outputs_us: float = 0.0
    tokens_per_second: float = 0.0
    graph_steps: int = 0
    compiled_steps: int = 0
    prefix_hit_rate: float = 0.0
    prefix_hit_tokens: int = 0
    prefix_evictions: int = 0
    prefix_invalidations: int = 0

    @classmethod
    def of(cls, pools, scheduler, times: StepTimes, graph_steps: int = 0, compiled_steps: int = 0) -> BatcherStats:
        """Figures of a batcher's pools and scheduler."""
        total = sum(group.manager.num_blocks for group in scheduler.groups)
        used = sum(group.manager.used_blocks for group in scheduler.groups)
        seconds = sum(times.seconds.values())
        return cls(
            blocks_total=total,
            blocks_used=used,
            blocks_limit=sum(group.max_blocks for group in scheduler.groups),
            bytes_total=sum(tensor.untyped_storage().nbytes() for tensor in pools.storages()),
            utilization=used / total if total else 0.0,
            waste=_waste(pools, scheduler),
            preemptions=scheduler.num_preemptions,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            batch_occupancy=times.sequences / (times.steps * scheduler.config.max_num_seqs) if times.steps else 0.0,
            steps=times.steps,
            new_tokens=times.new_tokens,
            prompt_tokens=times.prompt_tokens,
            schedule_seconds=times.seconds["schedule"],
            forward_seconds=times.seconds["forward"],
            sample_seconds=times.seconds["sample"],
            bookkeeping_us=statistics.median(times.bookkeeping) if times.bookkeeping else 0.0,
            outputs_us=statistics.median(times.outputs) if times.outputs else 0.0,
            tokens_per_second=times.new_tokens / seconds if seconds else 0.0,
            graph_steps=graph_steps,
            compiled_steps=compiled_steps,
            **_prefix(scheduler.prefix),
        )


def _prefix(prefix) -> dict:
    """What a prefix cache tells."""
    if prefix is None:
        return {}
    return dict(
        blocks_cached=prefix.num_cached,
        prefix_hit_rate=prefix.num_hit / prefix.num_queried if prefix.num_queried else 0.0,
        prefix_hit_tokens=prefix.num_hit,
        prefix_evictions=prefix.num_evicted,
        prefix_invalidations=prefix.num_invalidated,
    )


def _waste(pools, scheduler) -> float:
    """Share of the slots of held blocks, weighted by bytes, that hold no token; a shared block counts once."""
    held_bytes = token_bytes = 0
    size, batch = scheduler.block_size, scheduler.batch
    for index, group in enumerate(scheduler.groups):
        filled: dict[int, int] = {}
        for row, request in enumerate(batch.requests):
            computed = int(batch.num_computed[row])
            for column, block in enumerate(group.manager.block_table_view(request.key)):
                if block >= 0:
                    tokens = max(0, min(size, computed - column * size))
                    filled[block] = max(filled.get(block, 0), tokens)
        held_bytes += len(filled) * size * pools.bytes_per_block[index]
        token_bytes += sum(filled.values()) * pools.bytes_per_block[index]
    return 1 - token_bytes / held_bytes if held_bytes else 0.0
