"""Requests with adapters of their own: PEFT's adapters, switched for the time of a forward.

Contract: a step with requests of several adapters runs one packed forward for each of them; afterwards, also after an
error, the model has the adapters that were active before it, enabled or not, and its parameters require gradients as
before. A request without an adapter name is computed with whatever is active. PEFT is not imported: its layers are
recognised by what they keep. Steps of several batchers over one model take turns; nobody else may use the model
while such a step runs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .packed_metadata import PackingError
from .request import Request
from .scheduler_output import SchedulerOutput

BASE = "__base__"  # the model without any adapter; PEFT's own name for that where rows choose their adapters

# What PEFT's layers and models remember of which adapter is on, as instance attributes.
_STATE = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled")
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # base model -> lock of its steps


def check_adapter(model, name: str) -> None:
    """Refuse an adapter that no request can be computed with.

    Raises:
        ValueError: the model has no adapters, or not this one, or they are merged into its weights.
        PackingError: it is of a kind that cannot be packed.
    """
    if not isinstance(name, str):
        raise ValueError(f"adapter_name must be a string, got {name!r}")
    configs = _configs(model)
    if configs is None:
        raise ValueError(
            f"adapter_name={name!r}: {type(model).__name__} has no PEFT adapters; load one (model.load_adapter), or "
            "make the batcher of the PeftModel"
        )
    if name != BASE and name not in configs:
        known = ", ".join(map(repr, configs)) or "none"
        raise ValueError(f"adapter_name={name!r} is unknown, the model has {known} ({BASE!r} is the model without one)")
    if any(vars(module).get("merged_adapters") for module in model.modules()):
        raise ValueError(f"adapter_name={name!r}: adapters are merged into the weights; unmerge them first")
    if name != BASE:
        _refuse_kind(name, configs[name])


def check_active(model) -> None:
    """Raise PackingError if an adapter is active that cannot be packed."""
    configs = getattr(model, "peft_config", None) if is_adapted(model) else None
    for name in adapter_state(model)[0] if isinstance(configs, dict) else ():
        if name in configs:
            _refuse_kind(name, configs[name])


def _refuse_kind(name: str, config) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise PackingError(f"adapter {name!r} ({kind}) puts tokens of its own before each text, which cannot be packed")
    if getattr(config, "alora_invocation_tokens", None):
        raise PackingError(f"adapter {name!r} (activated LoRA) begins inside a text, which a packed forward cannot do")


def is_adapted(model) -> bool:
    """Whether PEFT has changed a model."""
    return "peft_config" in vars(model) or hasattr(type(model), "peft_config")


def adapter_state(model) -> tuple[tuple[str, ...], bool]:
    """Which adapters are active, and whether they are disabled; `((), False)` without any."""
    active, disabled = (), False
    for module in model.modules() if is_adapted(model) else ():
        if _is_tuner(module):
            active, disabled = module._active_adapter, bool(module._disable_adapters)
            if active:  # a module that only some adapters replace has none with the others
                break
    # Virtual tokens have no layers; the model itself knows of them.
    active = active or vars(model).get("active_adapter") or ()
    return (active,) if isinstance(active, str) else tuple(active), disabled


def rows_choose_adapters(model) -> bool:
    """Whether PEFT tells the layers, for the call that runs, which row of the batch takes which adapter."""
    if not is_adapted(model):
        return False
    hooks = (hook for module in model.modules() for hook in vars(module)["_forward_pre_hooks"].values())
    return any(getattr(getattr(hook, "func", hook), "__module__", "").startswith("peft.") for hook in hooks)


def _configs(model) -> dict | None:
    """Adapter name -> its config, of a model that can switch between them; None for any other."""
    switches = hasattr(type(model), "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
    return model.peft_config if switches else None


def _is_tuner(module: torch.nn.Module) -> bool:
    return "_disable_adapters" in vars(module) or hasattr(type(module), "_disable_adapters")


def activate(model, name: str) -> None:
    """Switch a model to one adapter, or to none (BASE); see `kept` for the way back."""
    for module in model.modules():
        if _is_tuner(module):
            if name == BASE:
                module.enable_adapters(False)
            elif module._disable_adapters:
                module.enable_adapters(True)
    if name != BASE:
        model.set_adapter(name)


@contextlib.contextmanager
def kept(model) -> Iterator[None]:
    """Afterwards the same adapters are active and the same parameters require gradients.

    PEFT cannot do that itself: its `set_adapter` makes parameters trainable, several active adapters or a disabled
    layer have no way back through it.
    """
    states = _States(model, {})
    before = states.now()
    # By their places: accelerate's hooks put new parameters there in every forward.
    places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    gradients = [(own, name, own[name].requires_grad) for own, name in places if own[name] is not None]
    try:
        yield
    finally:
        states.put(before)
        for own, name, required in gradients:
            if own[name].requires_grad != required:
                own[name].requires_grad = required


def turns(model) -> contextlib.AbstractContextManager:
    """Held while a model runs whose adapters a step of another thread might switch."""
    if not is_adapted(model):
        return contextlib.nullcontext()
    base = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    return _locks.setdefault(base, threading.RLock())


class StepPart(NamedTuple):
    """What one adapter computes of a step; `places [num_logits]` say where its logits belong among the step's."""

    adapter_name: str | None
    output: SchedulerOutput
    places: list[int]


def split(output: SchedulerOutput, running: Sequence[Request]) -> list[StepPart]:
    """A step by adapters, requests without one first.

    Args:
        output: of a step with at least one token.
        running: the request of each row.
    """
    rows: dict[str | None, list[int]] = {}
    parts: dict[str | None, StepPart] = {}

    def part_of(request: Request) -> StepPart:
        name = request.adapter_name
        if name not in parts:
            parts[name], rows[name] = StepPart(name, SchedulerOutput(), []), []
        return parts[name]

    decoding = range(output.num_decode) if output.decode_rows is None else output.decode_rows.tolist()
    for place, row in enumerate(decoding):
        part_of(running[row]).places.append(place)
        rows[running[row].adapter_name].append(row)
    at = output.num_decode
    for prefill in output.prefills:
        part = part_of(prefill.request)
        count = prefill.count if prefill.request.wants_prompt_logits else int(prefill.is_last)
        part.output.prefills.append(prefill)
        part.places.extend(range(at, at + count))
        at += count
    if len(parts) == 1:  # as it is: a step of all decoding rows is built without copying them
        return [StepPart(name, output, part.places) for name, part in parts.items()]
    for name, part in parts.items():
        mine = part.output
        mine.num_decode = len(rows[name])
        mine.decode_rows = np.array(rows[name], dtype=np.int64) if rows[name] else None
        mine.num_tokens = mine.num_decode + sum(prefill.count for prefill in mine.prefills)
    return sorted(parts.values(), key=lambda part: part.adapter_name is not None)


class Adapters:
    """The adapters of one batcher's model."""

    def __init__(self, model) -> None:
        self.model = model
        self._checked: tuple | None = None
        self._states: _States | None = None  # of the adapters that were admitted

    def fixed(self) -> contextlib.AbstractContextManager:
        """Meanwhile no other batcher's step switches them.

        Entering raises PackingError if an adapter is active that cannot be packed.
        """
        return self._fixed() if is_adapted(self.model) else contextlib.nullcontext()

    @contextlib.contextmanager
    def _fixed(self) -> Iterator[None]:
        with turns(self.model):
            if self._checked != (state := adapter_state(self.model)):
                check_active(self.model)
                self._checked = state
            yield

    def admit(self, name: str, plan, find_plan: Callable[[], object]) -> None:
        """Make sure that requests may be computed with an adapter; a new one is tried first.

        Args:
            plan: the PackingPlan that the batcher was made for.
            find_plan: makes that of the model as it is when called.
        Raises:
            ValueError: it is not there (any more), or merged.
            PackingError: it cannot be packed, or its layers cache something else.
        """
        configs = _configs(self.model)
        if self._states is not None and not self._states.is_of(configs):
            self._states = None
        if self._states is not None and name in self._states.of and not self._states.any_merged():
            return
        check_adapter(self.model, name)
        states = self._states or _States(self.model, configs)
        with turns(self.model), kept(self.model):
            activate(self.model, name)
            if find_plan() != plan:
                raise PackingError(f"adapter {name!r} changes what the layers of {type(self.model).__name__} cache")
            states.of[name] = states.now()
        self._states = states

    def forward(self, runner, parts: Sequence[StepPart]) -> torch.Tensor:
        """Logits `[N, vocab]` of a whole step, one forward for each of its parts; all adapters were admitted."""
        if len(parts) == 1 and parts[0].adapter_name is None:
            return runner.forward(runner.prepare(parts[0].output))
        total = sum(len(part.places) for part in parts)
        result: torch.Tensor | None = None
        states = self._states
        before = states.now()
        try:
            for part in parts:
                if part.adapter_name is not None:
                    states.put(states.of[part.adapter_name])
                logits = runner.forward(runner.prepare(part.output))
                if result is None:
                    result = logits.new_zeros((total, logits.shape[-1]))
                if part.places:  # else nobody looks at its logits
                    result[torch.tensor(part.places, device=result.device)] = logits[: len(part.places)]
        finally:
            states.put(before)
        return result


class _States:
    """What the model's own switching leaves in its layers, noted once for each adapter and written again.

    `set_adapter` walks through all modules and parameters, for tens of milliseconds where there are thousands.

    Attributes:
        of: adapter name -> the state of each module that has one.
    """

    def __init__(self, model, configs: dict) -> None:
        self._configs = dict(configs)
        self._owners = _owners(model)
        self.of: dict[str, list[dict]] = {}

    def is_of(self, configs: dict | None) -> bool:
        """Whether no adapter came or went."""
        same = configs is not None and configs.keys() == self._configs.keys()
        return same and all(configs[name] is config for name, config in self._configs.items())

    def any_merged(self) -> bool:
        return any(own.get("merged_adapters") for own in self._owners)

    def now(self) -> list[dict]:
        return [{name: own[name] for name in _STATE if name in own} for own in self._owners]

    def put(self, states: Sequence[dict]) -> None:
        for own, state in zip(self._owners, states, strict=True):
            for name in _STATE:
                if name in state:
                    own[name] = state[name]
                else:
                    own.pop(name, None)


def _owners(model) -> list[dict]:
    """Attributes of the modules that remember which adapter is on."""
    return [vars(module) for module in model.modules() if _is_tuner(module) or "active_adapter" in vars(module)]
