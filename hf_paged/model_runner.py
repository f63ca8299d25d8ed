"""The model's side of a step: tensors in, logits out.

Contract: one forward a step, over packed tokens. The pools' copies that the scheduler asks for are made before it, and
once. A forward that fails leaves nothing to undo: it wrote only slots that nothing has been counted for yet, and the
next try writes them again. A step that only decodes may be compiled (see `compiled`), and on a CUDA device replayed
from a graph of either (see `graphs`); every other step runs as it is.
"""

from __future__ import annotations

import torch
from transformers.utils import logging

from hf_paged_kernels import DecodeRows

from .config import PagedCacheConfig, SchedulerConfig
from .graphs import GraphRunner, capture_for, graph_sizes
from .kv_scales import for_cache
from .model_watch import ModelWatch
from .packed_cache import PackedCache, PackedPools
from .packed_metadata import PackedStep, StepBuilder
from .packing import PackingPlan, run_packed
from .prefix_cache import PrefixCache
from .scheduler import Scheduler
from .scheduler_output import SchedulerOutput
from .switch import switches

logger = logging.get_logger(__name__)


class ModelRunner:
    """A model over the blocks of one batcher.

    Args:
        model: the model.
        plan: what is known of it.
        cache_config, scheduler_config: settings; the latter with its defaults filled in.
        compile: whether steps that only decode are compiled, or the backend of torch.compile.
    Raises:
        PackingError: the model cannot be compiled.
        ValueError: the cache's formats or scales do not fit the model.
        RuntimeError: the memory does not cover the pool, or the backend of torch.compile fails.
    """

    def __init__(
        self,
        model,
        plan: PackingPlan,
        cache_config: PagedCacheConfig,
        scheduler_config: SchedulerConfig,
        compile: bool | str = False,
    ) -> None:
        self.model, self.plan = model, plan
        kv_scales = for_cache(cache_config, model=model)
        compiled = _compiled(model, plan, compile, cache_config, kv_scales)
        budget = scheduler_config.max_num_batched_tokens
        chunk = min(budget, scheduler_config.chunked_prefill_size or budget)
        self.pools = PackedPools(plan.specs, cache_config, scheduler_config.max_num_seqs, chunk, kv_scales)
        prefix = None
        if cache_config.enable_prefix_caching:
            prefix = PrefixCache(self.pools.groups, content_key=self.pools.content_key())
        native = DecodeRows if DecodeRows.available(len(self.pools.groups)) else None
        self.scheduler = Scheduler(self.pools.groups, scheduler_config, prefix, native)
        self.cache = PackedCache(self.pools, plan.windows)
        self.builder = StepBuilder(
            self.scheduler.batch,
            self.pools.windows,
            cache_config.block_size,
            budget,
            plan.input_device,
            self.pools.devices,
        )
        self._decode = DecodeForward(model, plan, self.cache, compiled)
        self._graphs: GraphRunner | None = None
        capture = capture_for(scheduler_config, plan.input_device)
        if capture is not None:
            sizes = graph_sizes(scheduler_config)
            self._graphs = GraphRunner(model, self._decode, self.pools, plan.input_device, sizes, capture)

    def copy_blocks(self) -> None:
        """Make the copies that are due: what a request is about to write into, and another holds as well."""
        self.pools.copy_blocks(self.scheduler.blocks.pending_copies)

    def prepare(self, output: SchedulerOutput) -> PackedStep:
        """The tensors of a step; no tensor of the step before may be used any more."""
        return self.builder.build(output)

    def forward(self, step: PackedStep) -> torch.Tensor:
        """Logits `[N, vocab]` of a step, as `sampler.sample` takes them."""
        self.copy_blocks()
        with torch.no_grad(), switches.switched(self.model):
            logits = None if self._graphs is None else self._graphs.run(step)
            if logits is None and step.chunks:
                logits = run_packed(self.model, self.plan.logits_to_keep, self.cache, step)
            return self._decode(step) if logits is None else logits

    @property
    def graph_steps(self) -> int:
        """Steps that were replayed."""
        return 0 if self._graphs is None else self._graphs.num_replays

    @property
    def compiled_steps(self) -> int:
        """Steps that ran through torch.compile."""
        return self._decode.num_compiled


class DecodeForward:
    """The forward of steps that only decode: compiled, or as it is.

    Args:
        model, plan: as those of the runner.
        cache: over its pools.
        compiled: the CompiledForward, or None.

    Attributes:
        num_compiled: forwards that were compiled ones.
    """

    def __init__(self, model, plan: PackingPlan, cache: PackedCache, compiled) -> None:
        self._model, self._plan, self._cache, self._compiled = model, plan, cache, compiled
        self._traced = self._watch = None
        if compiled is not None:
            self._traced, self._watch = compiled.cache(cache), ModelWatch(model)
        self.num_compiled = 0

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, step: PackedStep) -> torch.Tensor:
        """Logits `[D, vocab]` of a step without chunks; the model is switched and not recording gradients."""
        if self._compiled is not None and not self._watch.has_hooks():  # a compiled forward would not call them
            try:
                logits = self._compiled(self._model, self._traced, step)
                self.num_compiled += 1
                return logits
            except self._compiled.ERRORS as error:
                self._compiled = None
                logger.warning(
                    f"{type(self._model).__name__} has changed and cannot be compiled any more, its decoding steps run "
                    f"without torch.compile: {next(iter(str(error).splitlines()), '')}"
                )
        return run_packed(self._model, self._plan.logits_to_keep, self._cache, step)


def _compiled(model, plan: PackingPlan, compile: bool | str, config: PagedCacheConfig, kv_scales):
    if compile is False:
        return None
    from .compiled import check_backend, compiled_forward  # torch's compiler takes a second to import

    backend = check_backend(compile)
    return None if backend is None else compiled_forward(model, plan, backend, config, kv_scales)
