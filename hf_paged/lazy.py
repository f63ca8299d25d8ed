"""Lazy tensors: K/V and masks that stay what they are until someone reads their values.

Contract: a lazy tensor has the shape, dtype and device of the dense tensor that it stands for, and
carries a description (`LazyKV`: which layer's blocks; `LazyMask`: which pattern) for the hf_paged
attention function. Any other operation on it first makes the dense tensor, so every model that
transforms its keys, values or masks stays right without knowing about blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map_only


class LazyTensor(torch.Tensor):
    """A tensor without data whose dense twin is made, once, when an operation needs it."""

    @staticmethod
    def __new__(cls, shape, dtype: torch.dtype, device: torch.device) -> LazyTensor:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)

    def _make_dense(self) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how its dense tensor is made")

    def dense(self) -> torch.Tensor:
        """The dense tensor that this one stands for, made at the first call."""
        dense = self.__dict__.get("_dense")
        if dense is None:
            dense = self._dense = self._make_dense()
        return dense

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None) -> str:
        state = "dense" if self.__dict__.get("_dense") is not None else "lazy"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"


class LazyKV(LazyTensor):
    """Keys or values of one layer, `[batch, num_kv_heads, kv_length, head_dim]`, still in their blocks.

    Attributes:
        layer: the cache layer whose blocks hold them.
        step: the AttentionMetadata, or in a packed forward the PackedGroup, of the forward that made this tensor.
    """

    @staticmethod
    def __new__(cls, shape, dtype, device, layer, step, gather: Callable[[], torch.Tensor]) -> LazyKV:
        self = LazyTensor.__new__(cls, shape, dtype, device)
        self.layer, self.step, self._gather = layer, step, gather
        return self

    def _make_dense(self) -> torch.Tensor:
        return self._gather()


class LazyMask(LazyTensor):
    """An attention mask, `[batch, 1, query_length, kv_length]`, as its pattern.

    The dense form is additive (0 where a query may attend, the dtype's minimum elsewhere), which eager
    and sdpa attention both take.

    Args:
        pattern: 0 for a causal mask, the window (tokens that a query sees, itself included) for a sliding one,
            None for any other.
        mask_kwargs: what transformers gives a mask function.
        build: makes the mask that the attention implementation of a given name expects.

    Attributes:
        attention_mask: the 2D padding mask `[batch, columns]` of bool, or None.
        q_offset, kv_offset: column of the first query and of the first key.
        packed: the PackedStep whose sequences it masks, each in the same pattern; None for a batch of rows.
    """

    @staticmethod
    def __new__(cls, pattern: int | None, mask_kwargs: dict, build: Callable[[str], torch.Tensor | None]) -> LazyMask:
        shape = (mask_kwargs["batch_size"], 1, mask_kwargs["q_length"], mask_kwargs["kv_length"])
        dtype = mask_kwargs.get("dtype", torch.float32)
        self = LazyTensor.__new__(cls, shape, dtype, torch.device(mask_kwargs["device"]))
        self.pattern = pattern
        self.attention_mask = mask_kwargs["attention_mask"]
        self.q_offset, self.kv_offset = mask_kwargs["q_offset"], mask_kwargs["kv_offset"]
        self._build, self._starts = build, None
        self.packed = None
        self.mask_kwargs = mask_kwargs
        self._origin: LazyMask | None = None
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # accelerate brings every argument to the device of the layer that takes it.
        if func is torch.ops.aten._to_copy.default and type(args[0]) is cls:
            changed = {name: value for name, value in (kwargs or {}).items() if value is not None}
            device = changed.pop("device", None)
            if device is not None and changed.pop("dtype", args[0].dtype) == args[0].dtype:
                if changed.keys() <= {"non_blocking", "layout", "memory_format", "pin_memory"}:
                    return args[0].on(device)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def on(self, device: torch.device) -> LazyMask:
        """The same mask on another device, still lazy."""
        origin = self if self._origin is None else self._origin

        def build(implementation: str) -> torch.Tensor | None:
            mask = origin.build(implementation)
            return mask.to(device) if isinstance(mask, torch.Tensor) else mask

        moved = LazyMask(self.pattern, {**self.mask_kwargs, "device": device}, build)
        moved._origin, moved.packed = origin, self.packed
        return moved

    def build(self, implementation: str) -> torch.Tensor | None:
        """The mask as the attention implementation of this name expects it."""
        return self.dense() if implementation == "eager" else self._build(implementation)

    def _make_dense(self) -> torch.Tensor:
        return self._build("eager")

    def first_real_columns(self) -> torch.Tensor | bool | None:
        """First attended column of each row, `[batch]` int64 on the CPU.

        None stands for a mask without padding, False for one with holes or padding on the right.
        """
        if self._origin is not None:
            return self._origin.first_real_columns()
        if self.attention_mask is None:
            return None
        if self._starts is None:
            self._starts = left_padding(self.attention_mask, self.kv_offset + self.shape[-1])
        return self._starts


def left_padding(mask: torch.Tensor, num_columns: int) -> torch.Tensor | bool:
    """First real column of each row of a 2D mask, or False where the mask is anything but left padding.

    Args:
        mask: `[batch, columns]`, bool or integer; columns beyond `num_columns` are ignored, and missing
            ones count as masked, as in transformers.
    Returns:
        `[batch]` int64 on the CPU; a row without a real column starts at `num_columns`.
    """
    if mask.shape[1] < num_columns:
        return False
    mask = mask[:, :num_columns].bool()
    starts = num_columns - mask.sum(dim=1)
    expected = torch.arange(num_columns, device=mask.device)[None] >= starts[:, None]
    return starts.cpu() if torch.equal(mask, expected) else False
