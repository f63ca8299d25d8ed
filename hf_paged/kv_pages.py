"""The tensors of one layer in a pool: keys and values in blocks, and the scales of those that are kept in 8 bits.

Contract: whatever is done to blocks (growing, copying, clearing, gathering) is done to their codes and to the scales
that lie beside them alike. A reader gets codes and scales, or a dense copy that is dequantised; nothing here makes a
dequantised copy of more than it is asked for. Where keys are rotated, codes are those of rotated keys, whoever reads
them has `queries` rotate its queries, and a dense copy is rotated back.

Codes are indexed, filled and copied as bytes: torch has few operations on 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import hf_paged_kernels as kernels

from .kv_format import DYNAMIC, KVFormat
from .rotation import rotation_of

TORCH_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
_NAN_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.int8: 0x80}
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LayerPages:
    """Blocks of one layer.

    Args:
        shape: num_blocks, num_kv_heads, block_size.
        head_dims: of keys and of values.
        dtype: that the model computes keys and values in.
        device: where they lie.
        kv_format: what is kept.
        fixed: the scales of keys and of values that come from calibration, None for each that does not.

    Attributes:
        key_cache, value_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        k_scale, v_scale: float32, `[num_blocks, num_kv_heads, block_size]` where each token has its own, the fixed
            ones `[num_kv_heads]` or, of keys, `[num_kv_heads, head_dim_k]`; None where the dtype is the model's.

    Raises:
        ValueError: the format is one of 8 bits, and there are none of this dtype; or a fixed scale does not fit.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat,
        fixed: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> None:
        if kv_format.is_quantized and dtype not in _FLOATING:
            raise ValueError(
                f"kv_cache_dtype {kv_format.key_dtype!r} for keys and {kv_format.value_dtype!r} for values: only what "
                f"is computed in one of {_FLOATING} can be kept in 8 bits, this model computes in {dtype}"
            )
        self.key_cache = _empty((*shape, head_dims[0]), TORCH_DTYPES.get(kv_format.key_dtype, dtype), device)
        self.value_cache = _empty((*shape, head_dims[1]), TORCH_DTYPES.get(kv_format.value_dtype, dtype), device)
        self.k_scale = _scale("k_scale", kv_format.key_granularity, shape, head_dims[0], device, fixed[0])
        self.v_scale = _scale("v_scale", kv_format.value_granularity, shape, head_dims[1], device, fixed[1])
        self._rotation = rotation_of(head_dims[0], dtype, device) if kv_format.rotates_keys else None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that has blocks: fixed scales are not among them."""
        yield self.key_cache
        yield self.value_cache
        for scale in (self.k_scale, self.v_scale):
            if scale is not None and scale.dim() == 3:
                yield scale

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `key [T, num_kv_heads, head_dim_k]` and `value` at `slot_mapping [T]`; slot -1 stores nothing."""
        if self._rotation is not None:
            key = self._rotation.keys(key)
        kernels.reshape_and_cache(
            key, value, self.key_cache, self.value_cache, slot_mapping, k_scale=self.k_scale, v_scale=self.v_scale
        )

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[..., head_dim_k]` as the codes in the blocks want them."""
        return query if self._rotation is None else self._rotation.queries(query)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks, `pairs [N, 2]` of source and destination."""
        kernels.copy_blocks(self.key_cache, self.value_cache, pairs, k_scale=self.k_scale, v_scale=self.v_scale)

    def zero_blocks(self, index: torch.Tensor) -> None:
        """Set the blocks `index [N]` to zero."""
        for tensor in self.tensors():
            _bytes(tensor).index_fill_(0, index, 0)

    def fill_with_nan(self) -> None:
        """Make every slot NaN, so that whatever reads one that was never written shows."""
        for cache in (self.key_cache, self.value_cache):
            _bytes(cache).fill_(_NAN_CODES.get(cache.dtype, float("nan")))
        for tensor in self.tensors():
            if tensor.dim() == 3:
                tensor.fill_(float("nan"))

    def gather(self, which: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dense copy of the keys (0) or values (1) at `slots [batch, T]`, zeros at slot -1.

        Returns `[batch, num_kv_heads, T, head_dim]`, of `dtype` where they are kept in 8 bits, else as they are kept.
        """
        cache, scale = (self.value_cache, self.v_scale) if which else (self.key_cache, self.k_scale)
        rotation = None if which else self._rotation
        size = cache.shape[2]
        blocks, offsets = slots.clamp(min=0) // size, slots.clamp(min=0) % size
        dense = _bytes(cache)[blocks, :, offsets]  # [batch, T, num_kv_heads, head_dim]
        if scale is not None:
            scale = scale[blocks, :, offsets] if scale.dim() == 3 else scale
            scale = scale if scale.dim() == 2 else scale[..., None]
            wide = torch.promote_types(dtype, torch.float32)  # until rotated back
            dense = kernels.dequantize(dense.view(cache.dtype), scale, dtype if rotation is None else wide)
        if rotation is not None:
            dense = rotation.keys_back(dense).to(dtype)
        dense.masked_fill_((slots < 0)[..., None, None], 0)
        return dense.transpose(1, 2).contiguous()  # models reshape it as they would a concatenated one

    def enlarge(self, num_blocks: int) -> None:
        """Have so many blocks, with the content of those that there are; new ones hold anything.

        One tensor at a time, so that no more than one of the old ones lives beside its successor.
        """
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dim() > 2 and tensor.shape[0] < num_blocks:
                setattr(self, name, _enlarged(tensor, num_blocks))


def _enlarged(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    larger = _empty((num_blocks, *tensor.shape[1:]), tensor.dtype, tensor.device)
    _bytes(larger)[: tensor.shape[0]].copy_(_bytes(tensor))
    return larger


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that can be indexed and filled; wider dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in _NAN_CODES else tensor


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
        return torch.empty(shape, dtype=dtype, device=device)


def _scale(name: str, granularity: str | None, shape, head_dim: int, device, fixed) -> torch.Tensor | None:
    """The scales of a cache: room for dynamic ones, fixed ones in the shape that the operators take."""
    if granularity is None:
        return None
    if granularity == DYNAMIC:
        return _empty(shape, torch.float32, device)
    num_kv_heads = shape[1]
    if fixed is None:
        raise ValueError(f"{name}: kv_scale_granularity {granularity!r} needs kv_scales, and there are none here")
    expected = {"per_tensor": (), "per_head": (num_kv_heads,), "per_channel": (num_kv_heads, head_dim)}[granularity]
    got = tuple(fixed.shape)
    if got != expected and not (granularity == "per_tensor" and got == (1,)):
        raise ValueError(
            f"{name} of kv_scales has the shape {list(got)}; {granularity} of {num_kv_heads} heads of {head_dim} takes "
            f"{list(expected)}"
        )
    with torch.inference_mode(False):
        scale = fixed.detach().to(device=device, dtype=torch.float32, copy=True)
        return scale.reshape(1).expand(num_kv_heads).contiguous() if granularity == "per_tensor" else scale.contiguous()
