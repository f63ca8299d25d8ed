"""The model's side of a step: tensors in, logits out.

Contract: one forward a step, over packed tokens. The pools' copies that the scheduler asks for are made before it, and
once. A forward that fails leaves nothing to undo: it wrote only slots that nothing has been counted for yet, and the
next try writes them again. Inputs, slots, lengths and block tables of steady decode stay at the same addresses (see
`StepBuilder`), which is what capturing it in a graph needs; no graph is captured yet.
"""

from __future__ import annotations

import torch

from .config import PagedCacheConfig, SchedulerConfig
from .packed_cache import PackedCache, PackedPools
from .packed_metadata import PackedStep, StepBuilder
from .packing import PackingPlan, run_packed
from .scheduler import Scheduler, SchedulerOutput
from .switch import switches


class ModelRunner:
    """A model over the blocks of one batcher.

    Args:
        model: the model.
        plan: what is known of it.
        cache_config, scheduler_config: settings; the latter with its defaults filled in.
    Raises:
        RuntimeError: the memory does not cover the pool.
    """

    def __init__(
        self, model, plan: PackingPlan, cache_config: PagedCacheConfig, scheduler_config: SchedulerConfig
    ) -> None:
        self.model, self.plan = model, plan
        budget = scheduler_config.max_num_batched_tokens
        chunk = min(budget, scheduler_config.chunked_prefill_size or budget)
        self.pools = PackedPools(plan.specs, cache_config, scheduler_config.max_num_seqs, chunk)
        self.scheduler = Scheduler(self.pools.groups, scheduler_config)
        self.cache = PackedCache(self.pools, plan.windows)
        self.builder = StepBuilder(
            self.scheduler.batch,
            self.pools.windows,
            cache_config.block_size,
            budget,
            plan.input_device,
            self.pools.devices,
        )

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
            return run_packed(self.model, self.plan.logits_to_keep, self.cache, step)
