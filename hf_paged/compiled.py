"""Decoding steps through torch.compile: traced whole, tried against the forward that is not compiled, then used.

Contract: `compiled_forward` compiles the forward of a decoding step for one model, once for each configuration, backend
and size of blocks, and gives it out only if it computes what the packed forward computes: both run the same requests
over pools of their own, so that what the compiled one writes is read as well. Two graphs are made: of one
row, and of any number of rows. The number of rows, the width of the block tables and the size of the pools are dynamic,
so steps compile nothing further; prompts are not compiled.

A model is refused, with the reason, where dynamo cannot trace it whole (it computes with its keys and values or its
mask, looks at values, or a hook does something that dynamo does not know), where its attention gathers keys and values,
and where logits differ.
"""

from __future__ import annotations

import dataclasses
import threading
import types
import weakref

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from transformers.utils import logging

from .config import PagedCacheConfig, SchedulerConfig
from .graphs import logits_difference, tolerance
from .model_watch import ModelWatch
from .packed_cache import PackedCache, PackedPools
from .packed_metadata import PackedStep, PackingError, StepBuilder
from .packing import PackingPlan, run_packed
from .request import Request
from .scheduler import Scheduler
from .switch import switches
from .traced_cache import TracedCache

logger = logging.get_logger(__name__)

DEFAULT_BACKEND = "inductor"
_LONGEST_WINDOW_CROSSED = 40
_STEPS = 5  # decoding steps that are compared for each graph
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def check_backend(compile: bool | str) -> str | None:
    """The backend of torch.compile that an argument `compile` asks for, None for none.

    Raises:
        ValueError: torch has no such backend.
    """
    if isinstance(compile, bool):
        return DEFAULT_BACKEND if compile else None
    backends = torch.compiler.list_backends(exclude_tags=())
    if not isinstance(compile, str) or compile not in backends:
        raise ValueError(
            f"compile must be True, False or a backend of torch.compile ({', '.join(backends)}), got {compile!r}"
        )
    return compile


def compiled_forward(model, plan: PackingPlan, backend: str, config: PagedCacheConfig, kv_scales) -> CompiledForward:
    """The compiled decoding step of a model, tried once for each configuration, backend, size and format of blocks.

    Args:
        config: of the cache.
        kv_scales: its fixed scales, or None.
    Raises:
        PackingError: with the reason why the model cannot be compiled.
        RuntimeError: the backend fails, for example without a C++ compiler.
    """
    with _lock:
        known = _known.setdefault(model, {})
        config = dataclasses.replace(config, num_blocks=None, memory_fraction=None, enable_prefix_caching=False)
        key = id(plan), backend, config
        if key not in known:
            try:
                found = _try(model, plan, backend, config, kv_scales)
            except PackingError as error:
                found = str(error)
            known[key] = plan, found  # the plan stays, so that its id does
        _, found = known[key]
    if isinstance(found, str):
        raise PackingError(found)
    return found


class CompiledForward:
    """The forward of a decoding step, compiled.

    Args:
        backend: of torch.compile.
        windows: layer -> window of the attention that reads it.

    Attributes:
        ERRORS: what a call raises where the model has changed and cannot be traced any more; nothing was computed.
    """

    ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)

    def __init__(self, backend: str, windows: dict[int, int]) -> None:
        self.backend, self.windows = backend, windows
        # Dynamo counts and limits compilations by code object: each model has its own.
        function = types.FunctionType(_forward.__code__.replace(), _forward.__globals__)
        self._run = torch.compile(function, backend=backend, fullgraph=True)

    def cache(self, packed: PackedCache) -> TracedCache:
        """The cache to call it with, over the pools of `packed`."""
        return TracedCache(packed, self.windows)

    def __call__(self, model, cache: TracedCache, step: PackedStep) -> torch.Tensor:
        """Logits `[D, vocab]` of a step without chunks; the model is switched and not recording gradients."""
        cache.load(step)
        try:
            return self._run(model, step.input_ids, step.position_ids, cache)
        finally:
            cache.clear()


def _forward(model, input_ids, position_ids, cache):
    output = model(
        input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, return_dict=True
    )
    return output.logits[0]


def _try(model, plan: PackingPlan, backend: str, config: PagedCacheConfig, kv_scales) -> CompiledForward:
    name, compiled = type(model).__name__, None
    reason = ModelWatch.reason_against(model)
    if reason is not None:
        raise PackingError(f"compile=True: {reason}; leave compile=False for this {name}")
    logger.info(f"compiling the decoding step of {name} with {backend!r}")
    with torch.no_grad(), switches.switched(model):
        for count in (3, 1):
            eager, other = (_Side(model, plan, count, config, kv_scales) for _ in range(2))
            for decoded in range(-1, _STEPS):
                steps = eager.prepare(), other.prepare()
                expected = eager.run(steps[0])
                if decoded < 0:
                    other.run(steps[1])
                    compiled = compiled or CompiledForward(backend, _windows(name, eager.reads))
                    cache = compiled.cache(other.cache)
                else:
                    if decoded == 0:
                        _leave_open(steps[1], other.pools)
                    logits = _run(name, compiled, model, cache, steps[1])
                    _compare(name, logits, expected, plan, config)
                for side in (eager, other):
                    side.advance(expected.argmax(dim=-1).tolist())
                if count > 1 and decoded == 1:
                    for side in (eager, other):
                        side.drop_one()
    return compiled


def _run(name: str, compiled: CompiledForward, model, cache: TracedCache, step: PackedStep) -> torch.Tensor:
    try:
        return compiled(model, cache, step)
    except BackendCompilerFailed as error:
        raise _backend_failed(compiled.backend, error) from error
    except Exception as error:
        if type(error).__module__.startswith("torch._inductor"):
            raise _backend_failed(compiled.backend, error) from error
        raise PackingError(
            f"compile=True: torch.compile cannot trace a decoding step of {name} whole: {_reason(error)}; "
            "leave compile=False for it"
        ) from error


def _backend_failed(backend: str, error: Exception) -> RuntimeError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return RuntimeError(
        f"compile=True: the backend {backend!r} of torch.compile failed ({'; '.join(lines[:2])}); it needs a C++ "
        "compiler on a CPU and Triton on a GPU; leave compile=False without them"
    )


def _reason(error: Exception) -> str:
    """What dynamo says of a failed trace, in a line: its headline, and what was raised or met."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = [line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context:")]
    return " ".join([*lines[:1], *(f"({text})" for text in context[:1] if text)]) or type(error).__name__


def _windows(name: str, reads: list[tuple[int | None, int]]) -> dict[int, int]:
    """Layer -> window, of what attention was seen to read."""
    windows: dict[int, int] = {}
    for layer, window in reads:
        if layer is None:
            raise PackingError(
                f"compile=True: attention of {name} runs over gathered keys and values, one sequence after the other, "
                "which torch.compile cannot trace; leave compile=False for it"
            )
        if windows.setdefault(layer, window) != window:
            raise PackingError(f"compile=True: layer {layer} of {name} is read through two windows")
    return windows


def _leave_open(step: PackedStep, pools: PackedPools) -> None:
    """Tell dynamo which sizes change from step to step. One row is a case of its own."""
    rows = step.num_decode
    open_sizes = [(storage, 0) for storage in pools.storages()]
    open_sizes += [(group.decode_tables, 1) for group in step.groups]
    if rows > 1:
        open_sizes += [(step.input_ids, 1), (step.position_ids, 1)]
        for group in step.groups:
            open_sizes += [(group.slot_mapping, 0), (group.decode_lens, 0), (group.decode_tables, 0)]
    for tensor, dimension in open_sizes:
        torch._dynamo.mark_dynamic(tensor, dimension)


def _compare(name: str, logits: torch.Tensor, expected: torch.Tensor, plan: PackingPlan, config) -> None:
    bound = max(tolerance(dtype, config) for spec in plan.specs.values() for dtype in spec.dtypes)
    difference = logits_difference(logits, expected)
    if not difference <= bound:  # NaN is no agreement
        raise PackingError(
            f"compile=True: {name} gives other logits compiled than not (difference {difference:.2g} of their "
            f"spread); leave compile=False for it"
        )


class _Side:
    """The requests of the trial over pools of their own, run in one of the two ways."""

    def __init__(self, model, plan: PackingPlan, count: int, config: PagedCacheConfig, kv_scales) -> None:
        self.model, self.plan, block_size = model, plan, config.block_size
        narrow = [window for window in plan.windows if window and window <= _LONGEST_WINDOW_CROSSED]
        lengths = [max([9, *(window - 2 for window in narrow)]), 6, 3][:count]
        blocks = 2 * (sum(lengths) + count * _STEPS) // block_size + 2 * count + 2
        config = dataclasses.replace(config, num_blocks=blocks)
        self.pools = PackedPools(plan.specs, config, count, 64, kv_scales)
        for pool in self.pools.pools:
            pool.fill_with_nan()  # whatever reads a slot that was never written shows
        self.scheduler = Scheduler(self.pools.groups, SchedulerConfig(max_num_seqs=count, max_num_batched_tokens=64))
        devices, windows = self.pools.devices, self.pools.windows
        self.builder = StepBuilder(self.scheduler.batch, windows, block_size, 64, plan.input_device, devices)
        self.cache = PackedCache(self.pools, plan.windows)
        self.reads: list[tuple[int | None, int]] = []
        vocab = model.get_input_embeddings().weight.shape[0]
        for key, length in enumerate(lengths):
            tokens = [(37 * key + 11 * index + 5) % vocab for index in range(length)]
            self.scheduler.add(Request(str(key), tokens, key=key, max_tokens=length + 2 * _STEPS))

    def prepare(self) -> PackedStep:
        self.output = self.scheduler.schedule()
        return self.builder.build(self.output)

    def run(self, step: PackedStep) -> torch.Tensor:
        step.reads = self.reads
        try:
            return run_packed(self.model, self.plan.logits_to_keep, self.cache, step)
        finally:
            step.reads = None

    def advance(self, tokens: list[int]) -> None:
        self.scheduler.update(self.output, tokens, {})

    def drop_one(self) -> None:
        self.scheduler.finish(self.scheduler.batch.requests[-1], "length")
