"""Decoding steps replayed from graphs: one captured forward for each size of batch, over buffers that never move.

Contract: `GraphRunner.run(step)` returns the logits of a step of plain decode, or None where the step is to run as it
is. A captured forward reads its inputs, positions, slots, lengths and block tables from static buffers and nothing
else of the step; rows up to the size that was captured write no slot and see no key. Nothing that a capture froze may
change unseen: a pool that grew, tables that became wider, weights that moved, hooks and modules that came are looked
for before each replay, and graphs are captured again or given up. What cannot be captured runs eagerly, after one line
in the log.

Whatever needs a device is in the capture, `CudaCapture`; all else runs on a CPU, and is tested there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging

from .config import PagedCacheConfig, SchedulerConfig
from .model_watch import ModelWatch
from .packed_cache import PackedPools
from .packed_metadata import PackedGroup, PackedStep

logger = logging.get_logger(__name__)

# A graph costs about as much as so many steps: a warm-up, the capture, the comparison. It is captured when its size
# has been asked for as often since something moved, so that pools which grow all the time at most double the cost.
STEPS_BEFORE_CAPTURE = 3
# Largest root mean square difference of the logits, relative to their spread, between a replay and the step itself:
# a row more or less, or fusing, makes other kernels, which round otherwise. Exchanged rows differ by about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# The same where keys or values are kept in 8 bits: rounding may make another code, a step as large as a sixteenth.
QUANTIZED_TOLERANCE = 0.05


class CaptureError(RuntimeError):
    """A forward cannot be captured, and why."""


def logits_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference of two `[N, vocab]`, as a share of the spread of the second."""
    logits, expected = logits.float(), expected.float()
    return float((logits - expected).square().mean().sqrt() / expected.std().clamp(min=1e-20))


def tolerance(dtype: torch.dtype, config: PagedCacheConfig) -> float:
    """Largest difference of the logits that rounding explains, for a model of this dtype over such a cache."""
    return max(TOLERANCE.get(dtype, 0.1), QUANTIZED_TOLERANCE if config.formats.is_quantized else 0.0)


def graph_sizes(config: SchedulerConfig) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, multiples of 8, above 256 of 32, up to all rows."""
    if config.cuda_graph_sizes is not None:
        return config.cuda_graph_sizes
    most = config.max_num_seqs
    sizes = {1, 2, 4, *range(8, min(most, 256), 8), *range(256, most, 32)}
    return (*sorted(size for size in sizes if size < most), most)


def capture_for(config: SchedulerConfig, device: torch.device) -> CudaCapture | None:
    """How decoding steps on a device are captured; None where they are not."""
    if device.type != "cuda" or config.cuda_graphs is False:
        return None
    return CudaCapture(device)


class CudaCapture:
    """Captures on a CUDA device. The graphs share one memory pool: no two of them run at once, and what one leaves
    for the caller is copied out of it before the next one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = None

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function as the capture will, on a side stream, so that kernels are loaded and memory is there."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the function without running it; return what replays it."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads (another batcher, a data loader) may allocate meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                function()
        return graph.replay


class GraphRunner:
    """The captured decoding steps of one batcher.

    Args:
        model: the model; only its tensors and hooks are looked at.
        forward: computes the logits of a step, `[rows, vocab]`, and says whether it `is_compiled`, that is traced
            whole, without any look at values.
        pools: K/V of the batcher.
        input_device: where the model takes its input.
        sizes: numbers of rows to capture, rising.
        capture: how.

    Attributes:
        num_replays: steps that were replayed.
        num_captures: graphs that were captured so far.
        refusal: why nothing is captured, or None.
    """

    def __init__(
        self,
        model,
        forward: Callable[[PackedStep], torch.Tensor],
        pools: PackedPools,
        input_device: torch.device,
        sizes: Sequence[int],
        capture: CudaCapture,
    ) -> None:
        self._model, self._forward, self._pools, self._capture = model, forward, pools, capture
        self._input_device, self.sizes = input_device, tuple(sizes)
        self._buffers: StaticBuffers | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._asked: dict[int, int] = {}
        self._addresses: list[int] = []
        self._watch: ModelWatch | None = None
        self._thoroughly = True
        self.num_replays = self.num_captures = 0
        devices = {input_device, *pools.devices}
        self.refusal: str | None = None
        if len(devices) > 1:
            self.refusal = f"its layers lie on {', '.join(sorted(map(str, devices)))}"
        # Where a step's number of rows leads: the smallest size that holds them.
        self._size_for: list[int] = [0]
        for size in self.sizes:
            self._size_for += [size] * (size + 1 - len(self._size_for))

    def run(self, step: PackedStep) -> torch.Tensor | None:
        """Logits `[D, vocab]` of a step of plain decode; None where it has to run as it is."""
        count = step.num_decode
        if self.refusal is not None or step.chunks or count >= len(self._size_for):
            self._thoroughly = True  # what changes a model mostly comes before prompts
            return None
        if not self._is_as_captured(step):
            self.forget()
        size = self._size_for[count]
        if size in self._graphs:
            self._buffers.load(step, size)
            self._graphs[size]()
            self.num_replays += 1
            return self._buffers.logits[:count].clone()  # a request may keep its row
        self._asked[size] = self._asked.get(size, 0) + 1
        if self._asked[size] <= STEPS_BEFORE_CAPTURE:
            return None
        try:
            return self._capture_and_compare(step, size)
        except Exception as error:  # whatever it was, the step itself has not run yet
            self._give_up(error)
            return None

    def forget(self) -> None:
        """Drop the graphs and their buffers; steps run as they are until graphs pay again."""
        self._graphs.clear()
        self._asked.clear()
        self._buffers = self._watch = None

    def _is_as_captured(self, step: PackedStep) -> bool:
        """Whether everything that graphs have the address of is still there."""
        addresses = [storage.data_ptr() for storage in self._pools.storages()]
        addresses += [group.decode_tables.shape[1] for group in step.groups]
        same = addresses == self._addresses
        self._addresses = addresses
        if self._watch is not None:
            same = self._watch.is_unchanged(self._model, self._thoroughly) and same
        self._thoroughly = False
        return same

    def _capture_and_compare(self, step: PackedStep, size: int) -> torch.Tensor:
        if self._watch is None:
            reason = ModelWatch.reason_against(self._model)
            if reason is not None:
                raise CaptureError(reason)
            self._watch = ModelWatch(self._model)
        if self._buffers is None:
            widths = [group.decode_tables.shape[1] for group in step.groups]
            self._buffers = StaticBuffers(self.sizes[-1], widths, self._pools, self._input_device)
        buffers = self._buffers
        static = buffers.step(step, size)

        def forward() -> None:
            buffers.keep(self._forward(static))

        # The real step is loaded: whatever runs writes what that step has to write.
        buffers.load(step, size)
        self._capture.warm_up(forward)
        # Not while it warms up: transformers looks for padding unless a stream is capturing.
        with contextlib.nullcontext() if self._forward.is_compiled else _HostReads():
            replay = self._capture.record(forward)
        buffers.logits[:size].fill_(float("nan"))  # what a replay does not write shows
        replay()
        logits, expected = buffers.logits[: step.num_decode].clone(), self._forward(step)
        bound = tolerance(self._pools.pools[0].key.dtype, self._pools.config)
        difference = logits_difference(logits, expected)
        if not difference <= bound:
            raise CaptureError(f"a replay gives other logits than the step (difference {difference:.2g} of the spread)")
        self._graphs[size] = replay
        self.num_captures += 1
        return expected

    def _give_up(self, error: Exception) -> None:
        self.refusal = str(error) or type(error).__name__
        self.forget()
        logger.warning(
            f"decoding steps of {type(self._model).__name__} run without CUDA graphs: {self.refusal.splitlines()[0]} "
            "(cuda_graphs=False in the scheduler_config says so from the start)"
        )


class StaticBuffers:
    """What captured forwards read and write, at addresses that stay.

    Args:
        rows: largest size.
        widths: columns of each group's block tables.
        pools: of the batcher.
        device: where everything lies.
    """

    def __init__(self, rows: int, widths: Sequence[int], pools: PackedPools, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._pools = pools
        self.input_ids, self.position_ids = zeros(rows), zeros(rows)
        self.slot_mappings = [torch.full((rows,), -1, dtype=torch.int64, device=device) for _ in widths]
        self.lens = [zeros(rows, dtype=torch.int32) for _ in widths]
        self.tables = [zeros(rows, width, dtype=torch.int32) for width in widths]
        self.logits: torch.Tensor | None = None
        self._rows = rows
        self._loaded = 0  # rows that are not known to be padding

    def step(self, step: PackedStep, size: int) -> StaticStep:
        """A step of `size` rows over the buffers."""
        static = StaticStep(step.batch, size)
        static.input_ids, static.position_ids = self.input_ids[None, :size], self.position_ids[None, :size]
        static.num_logits = size
        for index, like in enumerate(step.groups):
            group = StaticGroup(static, index, like.sliding_window, like.block_size)
            group.slot_mapping, group.decode_lens = self.slot_mappings[index][:size], self.lens[index][:size]
            group.decode_tables = self.tables[index][:size]
            # The longest row is not known when a graph is captured: what the tables can hold bounds it.
            group.max_decode_len = like.decode_tables.shape[1] * like.block_size
            static.groups.append(group)
        return static

    def load(self, step: PackedStep, size: int) -> None:
        """Copy a step's values, and make padding of the rows behind it."""
        count = step.num_decode
        self.input_ids[:count].copy_(step.input_ids[0])
        self.position_ids[:count].copy_(step.position_ids[0])
        for index, group in enumerate(step.groups):
            self.slot_mappings[index][:count].copy_(group.slot_mapping)
            self.lens[index][:count].copy_(group.decode_lens)
            self.tables[index][:count].copy_(group.decode_tables)
        if self._loaded > count:  # rows of an earlier step
            for tensor in (self.input_ids, self.position_ids, *self.lens):
                tensor[count : self._loaded].zero_()
            for slots in self.slot_mappings:
                slots[count : self._loaded].fill_(-1)
        self._loaded = count

    def keep(self, logits: torch.Tensor) -> None:
        """Copy logits `[size, vocab]` to where they are read: what a graph itself returned is its own memory."""
        if self.logits is None:
            self.logits = logits.new_empty(self._rows, logits.shape[1])
        self.logits[: len(logits)].copy_(logits)


class StaticGroup(PackedGroup):
    """A PackedGroup of a captured step: of values that only the host knows there are none."""

    __slots__ = ()

    def kv_ranges(self) -> tuple[list[int], list[int], int]:
        rows, bound = self.step.num_decode, self.max_decode_len
        return [0] * rows, [bound] * rows, rows * bound

    def kv_slots(self):
        raise CaptureError("it gathers keys and values, which takes lengths that only the host knows")


class StaticStep(PackedStep):
    """A PackedStep that is captured."""

    def ranges(self):
        raise CaptureError("its attention runs over one sequence after the other")

    def rows(self):
        raise CaptureError("it asks which rows take part")


class _HostReads(TorchDispatchMode):
    """Refuses whatever brings values of tensors to the host: a graph would freeze what was decided by them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _reads_values(func, args):
            raise CaptureError(f"its forward looks at values on the host ({func})")
        return func(*args, **(kwargs or {}))


def _reads_values(func, args) -> bool:
    if func is torch.ops.aten.index.Tensor:  # tagged, but only a mask makes its shape depend on values
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
