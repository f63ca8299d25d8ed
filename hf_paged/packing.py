"""Which models can be packed: found out by trying, never by a list.

Contract: `packing_plan(model)` runs two tiny sequences apart, with the model's own attention, and packed over small
pools, in chunks and token by token; only a model that gives the same logits both ways is admitted. The lengths cross a
small sliding window; a second try puts one sequence behind every position at which a model might change its
frequencies or scales. The answer, yes or no, is kept for each model and configuration.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .adapters import adapter_state, check_active, turns
from .config import PagedCacheConfig, SchedulerConfig
from .kv_pool import PoolKey
from .packed_cache import LayerSpec, PackedCache, PackedPools
from .packed_metadata import PackedStep, PackingError, StepBuilder
from .placement import input_device, placement
from .request import Request
from .scheduler import Scheduler
from .switch import NAME, switches

# Largest root mean square difference of the logits, relative to their spread. Exchanged sequences differ by about 1.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_LONGEST_WINDOW_CROSSED = 40
_plans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@dataclass(frozen=True)
class PackingPlan:
    """What was learnt of a model that can be packed.

    Attributes:
        specs: layer index -> LayerSpec of each layer that keeps keys and values.
        windows: for each cache layer its sliding window, or None.
        position_limit: positions from here on would change those before them in the same forward; None for none.
        max_position: one more than the largest position that the model has an embedding for; None where any will do.
        logits_to_keep: whether the model computes the logits of chosen positions alone.
        input_device: where it takes its input.
    """

    specs: dict[int, LayerSpec]
    windows: tuple[int | None, ...]
    position_limit: int | None
    max_position: int | None
    logits_to_keep: bool
    input_device: torch.device


def packing_plan(model) -> PackingPlan:
    """The plan of a model, tried once for each configuration.

    Raises:
        PackingError: with the reason why the model cannot be packed.
    """
    with turns(model), _lock:
        known = _plans.setdefault(model, {})
        key = _fingerprint(model)
        if key not in known:
            try:
                known[key] = _try(model)
            except PackingError as error:
                # What raised may have been a hook, or memory, and not the model: that counts from the third time on.
                tries = known[key, "tries"] = known.get((key, "tries"), 0) + 1
                if error.__cause__ is not None and tries < 3:
                    raise
                known[key] = str(error)
        if isinstance(known[key], str):
            raise PackingError(known[key])
        return known[key]


def run_packed(model, plan_or_keep, cache: PackedCache, step: PackedStep, **changes) -> torch.Tensor:
    """Logits `[N, vocab]` of one packed forward; the model is switched and not recording gradients.

    Args:
        plan_or_keep: whether the model takes `logits_to_keep` as an index.
        changes: arguments of the model to use instead.
    """
    arguments = dict(input_ids=step.input_ids, position_ids=step.position_ids, past_key_values=cache, use_cache=True)
    index = step.logits_index
    if index is not None:
        index = index.to(step.input_ids.device)
        if plan_or_keep:
            arguments["logits_to_keep"] = index
    arguments.update(changes)
    cache.step = step
    try:
        with switches.packed(step):
            logits = model(**arguments, return_dict=True).logits
    finally:
        cache.step = None
    if index is not None and not plan_or_keep:
        logits = logits.index_select(1, index.to(logits.device))
    return logits[0]


def _fingerprint(model) -> tuple:
    where, adapters = placement(model), adapter_state(model)
    kind = torch.device(where[0][0]).type.replace("meta", "cpu")
    own = switches.before(model.config.get_text_config(decoder=True))
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return where, adapters, own, autocast, model.config.to_json_string(use_diff=False)


def _try(model) -> PackingPlan:
    if not callable(getattr(model, "generate", None)) or model.config.is_encoder_decoder:
        raise PackingError(f"{type(model).__name__} is not a decoder-only model that generates")
    check_active(model)
    with torch.no_grad():
        trial = _Trial(model)
        trial.run_apart()
        with switches.switched(model):
            # Bloom, falcon and others fall back to their own attention without a word.
            stuck = model.config.get_text_config(decoder=True)._attn_implementation
            if stuck != NAME:
                raise PackingError(
                    f"{type(model).__name__} computes attention itself ({stuck}), not through the interface"
                )
            trial.run_packed()
            limit = trial.find_position_limit()
    return PackingPlan(
        specs=trial.specs,
        windows=trial.windows,
        position_limit=limit,
        max_position=trial.max_position,
        logits_to_keep=trial.logits_to_keep,
        input_device=trial.device,
    )


class _Trial:
    """The two sequences, their logits apart, and the pools of the packed run."""

    def __init__(self, model) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        self.device = input_device(model)
        self.max_position = _learned_positions(model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # below adapters
        self.logits_to_keep = "logits_to_keep" in inspect.signature(base.forward).parameters

    def run_apart(self) -> None:
        """Each sequence alone, over the model's own cache; that also shows what its layers cache."""
        layers = DynamicCache(config=self.config).layers
        self.windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
        narrow = [window for window in self.windows if window and window <= _LONGEST_WINDOW_CROSSED]
        longer = max([11, *(window + 4 for window in narrow)])
        vocab = self.model.get_input_embeddings().weight.shape[0]
        special = {1, 2, 0, *(_ids(self.config)), *(_ids(self.model.config))}
        usual = [token for token in range(min(vocab, 512)) if token not in special]
        self.tokens = [[usual[(37 * i + 11) % len(usual)] for i in range(8)]]
        self.tokens.append([usual[(53 * i + 29) % len(usual)] for i in range(longer)])
        with switches.switched(self.model, attention=False):
            self.expected = [self._alone(tokens) for tokens in self.tokens]
        if not self.specs:
            raise PackingError(f"{self.name} has no layer that keeps plain keys and values")

    def _alone(self, tokens: list[int], first_position: int = 0) -> torch.Tensor:
        cache = DynamicCache(config=self.config)
        ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(first_position, first_position + len(tokens), device=self.device)[None]
        try:
            output = self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, return_dict=True
            )
        except Exception as error:
            raise PackingError(f"{self.name} does not run with position_ids over a DynamicCache: {error}") from error
        if len(cache.layers) != len(self.windows):
            raise PackingError(f"{self.name} caches more layers than its config tells of")
        self.specs = self._specs(cache)
        return output.logits[0].float()

    def _specs(self, cache: DynamicCache) -> dict[int, LayerSpec]:
        specs = {}
        for index, layer in enumerate(cache.layers):
            if type(layer).__name__ == "DummyLayer":
                continue  # it reads what another layer keeps
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise PackingError(
                    f"layer {index} of {self.name} keeps more than keys and values: {type(layer).__name__}"
                )
            if not layer.is_initialized:
                continue
            key, value = layer.keys, layer.values
            pool = PoolKey(
                num_kv_heads=key.shape[1],
                head_dim_k=key.shape[3],
                head_dim_v=value.shape[3],
                dtype=torch.promote_types(key.dtype, value.dtype),
                device=key.device,
                sliding_window=self.windows[index] or 0,
            )
            specs[index] = LayerSpec(pool, (key.dtype, value.dtype))
        return specs

    def run_packed(self) -> None:
        """Both sequences at once: prompts in chunks, then token by token, under two claims of what is cached."""
        pools, scheduler, builder = self._engine(chunk=-(-len(self.tokens[1]) // 2))
        cache = PackedCache(pools, self.windows)
        prompts = [tokens[:-2] for tokens in self.tokens]
        requests = [
            Request(str(key), prompt, key=key, max_tokens=len(tokens))
            for key, (prompt, tokens) in enumerate(zip(prompts, self.tokens, strict=True))
        ]
        for request in requests:
            request.wants_prompt_logits = True
            scheduler.add(request)
        claims = [0, _far(self)]
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            step = builder.build(output)
            cache.shown_length = claims[step.serial % 2]
            logits = self._forward(cache, step).float()
            parts = [(scheduler.batch.requests[row], 1) for row in range(output.num_decode)]
            parts += [(prefill.request, prefill.count) for prefill in output.prefills]
            tokens, at = [], 0
            for request, count in parts:
                start = int(scheduler.batch.num_computed[request.row])
                self._compare(request.key, start, logits[at : at + count])
                at += count
                if start + count == request.num_tokens:
                    tokens.append(self.tokens[request.key][request.num_tokens])
            for request in scheduler.update(output, tokens, {}):
                scheduler.finish(request, "length")

    def find_position_limit(self) -> int | None:
        """Whether a sequence at far positions changes its neighbour, and from which position on."""
        far = _far(self)
        if self._neighbours_agree(far):
            return None
        limit = _original_positions(self.config)
        # Well below it, where transformers also puts back the frequencies that the first try has changed.
        if limit is not None and limit > 8 and self._neighbours_agree(limit - 5):
            return limit
        raise PackingError(f"{self.name} computes positions of one sequence from those of others in the same forward")

    def _neighbours_agree(self, position: int) -> bool:
        """Whether the first sequence stays what it is beside one whose four tokens begin at `position`."""
        pools, scheduler, builder = self._engine(chunk=8)
        first, other = self.tokens[0][:6], self.tokens[1][:4]
        for key, tokens in enumerate((first, other)):
            request = Request(str(key), tokens, key=key, max_tokens=len(tokens) + 1)
            request.wants_prompt_logits = True
            scheduler.add(request)
        step = builder.build(scheduler.schedule())
        positions = step.position_ids.clone()
        positions[:, len(first) :] += position
        logits = self._forward(PackedCache(pools, self.windows), step, position_ids=positions).float()
        return self._difference(logits[: len(first)], self.expected[0][: len(first)]) <= self._bound()

    def _engine(self, chunk: int) -> tuple[PackedPools, Scheduler, StepBuilder]:
        config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, chunked_prefill_size=chunk)
        blocks = 2 * (len(self.tokens[1]) // 4 + 2)
        # In the model's own dtype, whatever the cache will be: what 8 bits lose must not look like a fault.
        pools = PackedPools(self.specs, PagedCacheConfig(block_size=4, num_blocks=blocks), 2, 64)
        for pool in pools.pools:
            pool.fill_with_nan()  # whatever reads a slot that was never written shows
        scheduler = Scheduler(pools.groups, config)
        builder = StepBuilder(scheduler.batch, pools.windows, 4, 64, self.device, pools.devices)
        return pools, scheduler, builder

    def _forward(self, cache: PackedCache, step: PackedStep, **changes) -> torch.Tensor:
        try:
            return run_packed(self.model, self.logits_to_keep, cache, step, **changes)
        except Exception as error:
            raise PackingError(f"{self.name} does not run over packed sequences: {error}") from error

    def _compare(self, key: int, start: int, logits: torch.Tensor) -> None:
        expected = self.expected[key][start : start + len(logits)]
        difference = self._difference(logits, expected)
        if not difference <= self._bound():  # NaN is no agreement
            raise PackingError(
                f"{self.name} gives other logits for two packed sequences than for the two apart (difference "
                f"{difference:.2g} of their spread, from position {start} of a sequence of {len(self.tokens[key])})"
            )

    def _difference(self, logits: torch.Tensor, expected: torch.Tensor) -> float:
        expected = expected.to(logits.device)
        return float((logits - expected).square().mean().sqrt() / expected.std().clamp(min=1e-20))

    def _bound(self) -> float:
        return max(_TOLERANCE.get(dtype, 0.1) for spec in self.specs.values() for dtype in spec.dtypes)


def _far(trial: _Trial) -> int:
    """A position beyond everything that a model might compare positions with."""
    if trial.max_position is not None:
        return trial.max_position - 4
    known = [getattr(trial.config, "max_position_embeddings", None), _original_positions(trial.config), 70_000]
    return 2 * max(value for value in known if isinstance(value, int)) + 1


def _original_positions(config) -> int | None:
    """Positions that a model was trained on before its frequencies were stretched."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for value in (
        rope.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
        getattr(config, "max_position_embeddings", None),
    ):
        if isinstance(value, int):
            return value
    return None


def _learned_positions(model) -> int | None:
    """How many positions a model has embeddings for; None where it computes them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # without a vision tower
    config = model.config.get_text_config(decoder=True)
    for name, module in (decoder or model).named_modules():
        if isinstance(module, torch.nn.Embedding) and re.search(r"(^|[._])(wpe|\w*pos\w*)$", name):
            # Some keep a few rows in front for padding.
            return min(module.num_embeddings, getattr(config, "max_position_embeddings", module.num_embeddings))
    return None


def _ids(config) -> list[int]:
    """Token ids that a config gives a meaning to."""
    found = []
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_index")):
            found += value if isinstance(value, list) else [value]
    return [token for token in found if isinstance(token, int)]
