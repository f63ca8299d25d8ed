"""What a model's weights are at one moment, laid out so that comparing takes microseconds.

Contract: `WeightsView(model)` records modules, parameters, buffers, hooks, adapters and versions; `holds()` tells
whether all of it is still so, and reads no weight. `leaves` are the plain tensors with the weights, each once;
`signature(model)` is what else a comparison of contents needs, without anything that keeps weights in memory.

A view holds parts of the model, never the model itself. It holds no weak references to parameters, because
`torch.utils.swap_tensors` refuses tensors that have some.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_paged_kernels import ObjectSnapshot

from .module_tree import all_modules

_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)
_CONTENTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Plain attributes that change the output: of PEFT's layers and models; accelerate's hook, torch's packed int8 weights.
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "active_adapter")
_HOLDERS = ("_hf_hook", "_packed_params")
_CHANGING_ROPE = ("dynamic", "longrope")  # kinds of rotary embedding that set their buffers in the forward

_get_version = attrgetter("_version")
_get_data_ptr = torch.Tensor.data_ptr
_get_item = dict.get


class WeightsView:
    """The weights of a model as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._empty: list[dict] = []
        self._without_hooks: list[dict] = []
        self._next_hook = RemovableHandle.next_id
        self._dicts: list[dict] = []
        self._owners: list[dict] = []
        self._keys: list[str] = []
        self._known: set[int] = set()
        self._files: set[str] = set()
        self._folders: set[str] = set()
        found: dict[int, torch.Tensor] = {}  # parameters and buffers as the model names them, tied ones once
        leaves: dict[int, torch.Tensor] = {}  # the plain tensors in them
        for tensor in self._walk(model):
            if id(tensor) not in found:
                found[id(tensor)] = tensor
                leaves.update((id(leaf), leaf) for leaf in self._unwrap(tensor))
        self.tensors = list(found.values())
        self.leaves = list(leaves.values())
        counted = {**found, **leaves}.values()
        self._versioned = [tensor for tensor in counted if not tensor.is_inference()]
        self._pointed = [tensor for tensor in self.leaves if _has_data_ptr(tensor)]
        self._copies = [dict(contents) for contents in self._dicts]
        self._values = [_copy(value) for value in map(_get_item, self._owners, self._keys)]
        self._versions = sum(map(_get_version, self._versioned))
        self._data_ptrs = list(map(_get_data_ptr, self._pointed))
        self._snapshot = None
        if ObjectSnapshot.available():
            self._snapshot = ObjectSnapshot(self._versioned, self._pointed, [*self._dicts, *self._empty])

    def holds(self) -> bool:
        """Whether the model still is as it was."""
        try:
            if not self._parts_hold():
                return False
            if RemovableHandle.next_id != self._next_hook and not self._no_new_hooks():
                return False
            return list(map(_get_item, self._owners, self._keys)) == self._values
        except Exception:
            return False

    def _parts_hold(self) -> bool:
        """Whether versions, addresses and dicts are as they were.

        A snapshot is twice as fast as what follows, which decides where it sees another object or is not there. All
        loops run in C. A version only rises, so their sum tells as much as a list of them. Dicts are compared by the
        identity of their values first; other tensors in the same place raise, or differ, or are equal single
        numbers, whose values the next call compares again: no new snapshot may take such a one for what it was.
        """
        if self._snapshot is not None and self._snapshot.holds():
            return True
        return (
            sum(map(_get_version, self._versioned)) == self._versions
            and list(map(_get_data_ptr, self._pointed)) == self._data_ptrs
            and not any(self._empty)
            and self._dicts == self._copies
        )

    def _no_new_hooks(self) -> bool:
        """Called when somebody in this process registered a hook of any kind since this was called last."""
        registered = RemovableHandle.next_id
        if any(self._without_hooks):
            return False
        self._next_hook = registered
        return True

    def signature(self, model: nn.Module) -> tuple:
        """Modules, their classes, forwards and hooks, adapters, shapes, files: all but the content of weights."""
        modules, places = [], []
        index = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        for module in all_modules(model):
            forward = id(vars(module).get("forward"))
            hooks = (*module._forward_hooks, *module._forward_pre_hooks)  # numbers that a process never uses twice
            modules.append((weakref.ref(module), type(module), forward, hooks, (*module._modules, *module._parameters)))
            places.extend(index.get(id(parameter)) for parameter in module._parameters.values())
        shapes = [(leaf.dtype, leaf.device, tuple(leaf.shape), _strides(leaf)) for leaf in self.leaves]
        settings = zip(self._owners, self._keys, self._values, strict=True)
        # A dict is known by which one it is: `_values` has a copy of it, another one in each view.
        values = [value if key in _ADAPTERS else id(owner.get(key)) for owner, key, value in settings]
        return modules, places, shapes, values, self._file_states()

    def _walk(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """The tensors that count; notes which dicts and settings to compare."""
        offloaded: dict[nn.Module, bool] = {}  # module: whether its buffers are, too
        modules = list(all_modules(model))
        for module in modules:
            for hook in _offloading_hooks(module):
                for inside in module.modules() if hook.place_submodules else (module,):
                    offloaded[inside] = hook.offload_buffers
                yield from self._offload_source(hook)
        for module in modules:
            named = vars(module)
            if isinstance(module, torch.jit.ScriptModule):  # its dicts are views, made anew each time
                yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))
                continue
            for name in _HOOKS:
                (self._dicts if named[name] else self._without_hooks).append(named[name])
            simple = _reads_no_more(module)
            for name in _CONTENTS:
                contents = named[name]
                if simple and not contents:
                    continue
                if name == "_parameters" and module in offloaded:
                    continue
                if name == "_buffers" and (offloaded.get(module) or _changes_buffers(module)):
                    continue
                self._compare_dict(contents)
                if name in ("_parameters", "_buffers"):
                    yield from (tensor for tensor in contents.values() if tensor is not None)
            for name in (*_ADAPTERS, *_HOLDERS):
                if name in named:
                    self._compare_value(named, name)

    def _compare_dict(self, contents: dict) -> bool:
        """Compare a dict from now on. Returns whether it is a new one."""
        new = id(contents) not in self._known
        if new:
            self._known.add(id(contents))
            (self._dicts if contents else self._empty).append(contents)
        return new

    def _compare_value(self, owner: dict, key: str) -> None:
        self._owners.append(owner)
        self._keys.append(key)

    def _offload_source(self, hook: Any) -> Iterator[torch.Tensor]:
        """Tensors that an offloading hook of accelerate loads from, those in memory; notes files."""
        self._compare_value(vars(hook), "weights_map")
        source = hook.weights_map
        while hasattr(source, "dataset"):  # a view of a mapping by a prefix of the names
            self._compare_value(vars(source), "dataset")
            source = source.dataset
        if isinstance(source, Mapping) and not isinstance(source, dict):  # part in memory, part on disk
            parts = vars(source)
            if parts.get("save_folder"):
                self._folders.add(os.fspath(parts["save_folder"]))
            for entry in (parts.get("index") or {}).values():
                if isinstance(entry, dict) and entry.get("safetensors_file"):
                    self._files.add(os.fspath(entry["safetensors_file"]))
            source = parts.get("state_dict")
        if isinstance(source, dict) and self._compare_dict(source):
            yield from (tensor for tensor in source.values() if isinstance(tensor, torch.Tensor))

    def _file_states(self) -> list[tuple]:
        files = set(self._files)
        for folder in self._folders:
            files.update(entry.path for entry in os.scandir(folder) if entry.is_file())
        states = ((file, os.stat(file)) for file in sorted(files))
        return [(file, state.st_size, state.st_mtime_ns) for file, state in states]

    def _unwrap(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The plain tensors that a parameter consists of: more than itself for quantised ones."""
        if type(tensor) in _TENSOR_TYPES:
            yield tensor
            return
        attributes = vars(tensor)
        self._compare_dict(attributes)
        if hasattr(tensor, "__tensor_flatten__"):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            yield tensor
            state = attributes.get("quant_state")  # bitsandbytes keeps the scales of 4-bit weights in an object
            inner = [*attributes.values(), *(vars(state).values() if hasattr(state, "__dict__") else ())]
        for value in inner:
            if isinstance(value, torch.Tensor) and value is not tensor:
                yield from self._unwrap(value)


def _reads_no_more(module: nn.Module) -> bool:
    """Whether its forward cannot find parts that it was made without: one of torch's own layers."""
    home = type(module).__module__
    return home.startswith("torch.nn.modules.") and home != "torch.nn.modules.container"


def _copy(value: Any) -> Any:
    """A value to compare with: lists and dicts change in place."""
    return type(value)(value) if type(value) in (list, dict, set) else value


def _has_data_ptr(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # sparse layouts have none
        return False
    return True


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def _changes_buffers(module: nn.Module) -> bool:
    """Whether a forward of this module sets its buffers: a rotary embedding that depends on the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in _CHANGING_ROPE for kind in kinds)


def _offloading_hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of accelerate that load this module's weights for each forward."""
    hook = vars(module).get("_hf_hook")
    for single in getattr(hook, "hooks", (hook,)):
        if getattr(single, "offload", False) and getattr(single, "weights_map", None) is not None:
            yield single
