"""Rotation of keys by a Hadamard matrix, so that 8 bits lose less of them.

Contract: keys are rotated before they are rounded, queries before they meet them, and keys that are read back are
rotated back. With an orthogonal matrix R, (q R) . (k R) = q . k, so the function is unchanged and softcap, sinks
and masks keep their meaning; what changes is where rounding falls. A few channels of K are much larger than the others
and set the scale of a row; rotated, every channel holds a share of each (QuaRot, Ashkboos et al. 2024,
arXiv:2404.00456). docs/fp8_kv_cache.md has what that is worth, measured.

A head whose size is no power of two is rotated in equal parts of the largest power of two that divides it.

On the CPU sums and differences in C take the place of the product, which for a few tokens costs more to begin than to
compute. Where they cannot (`hadamard_product` says), a matrix is multiplied as on any device. The two add in another
order, and may differ in the last bit of float32: a compiled decoding step beside prompts that are not compiled, which
is far less than rounding to 8 bits.
"""

from __future__ import annotations

import functools

import torch

import hf_paged_kernels as kernels


class Rotation:
    """The rotation of one head size.

    H / sqrt(n), with H of +1 and -1, is rotation and inverse alike. Its square root is shared out as powers of two,
    H * 2 ** -ceil(log2(n) / 2) for keys and H * 2 ** -floor(log2(n) / 2) for queries and back: so every entry is exact
    in every dtype, and scores keep their size. Rotated keys are shorter by sqrt(2) where log2(n) is odd, which their
    scales take up.

    Args:
        head_dim: size of a head of keys.
        dtype: that products are computed in.
        device: where.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._head_dim, self._size = head_dim, part_size(head_dim)
        self._may_be_sums = device.type == "cpu" and dtype == torch.float32
        size = self._size
        exponent = size.bit_length() - 1
        matrix = torch.ones(1, 1, dtype=dtype, device="cpu")
        while matrix.shape[0] < size:  # Sylvester's construction
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        self._key_factor, self._query_factor = 2.0 ** -((exponent + 1) // 2), 2.0 ** -(exponent // 2)
        self._for_keys = (matrix * self._key_factor).to(device)
        self._for_queries = (matrix * self._query_factor).to(device)

    def keys(self, key: torch.Tensor) -> torch.Tensor:
        """Rotated keys of `[..., head_dim]`, in the dtype of the products: rounding follows anyway."""
        return self._product(key, self._for_keys, self._key_factor, self._for_keys.dtype)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[..., head_dim]` for rotated keys, in their own dtype."""
        return self._product(query, self._for_queries, self._query_factor, query.dtype)

    def keys_back(self, rotated: torch.Tensor) -> torch.Tensor:
        """The keys that `keys` rotated, in the dtype of the products."""
        return self._product(rotated, self._for_queries, self._query_factor, self._for_queries.dtype)

    def _product(self, states: torch.Tensor, matrix: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
        if self._may_be_sums:
            product = kernels.hadamard_product(states, self._size, factor, dtype)
            if product is not None and product.shape[-1] == self._head_dim:  # else the matrix refuses it
                return product
        states = states.to(matrix.dtype)
        if torch.is_autocast_enabled(states.device.type):  # which would take 16 bits for it
            with torch.autocast(states.device.type, enabled=False):
                return self._by_parts(states, matrix).to(dtype)
        return self._by_parts(states, matrix).to(dtype)

    def _by_parts(self, states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if self._size == self._head_dim:
            return states @ matrix
        return (states.unflatten(-1, (-1, self._size)) @ matrix).flatten(-2)


def part_size(head_dim: int) -> int:
    """The largest power of two that divides a head's size."""
    return head_dim & -head_dim


@functools.cache
def rotation_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> Rotation | None:
    """The rotation for heads that are computed in `dtype`; None for an odd size, which has none.

    Products are computed in float32, those of a float64 model in float64.
    """
    if part_size(head_dim) == 1:
        return None
    with torch.inference_mode(False):  # autograd could not keep an inference tensor
        return Rotation(head_dim, torch.float64 if dtype == torch.float64 else torch.float32, device)
