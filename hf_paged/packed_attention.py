"""Attention of a packed forward by the paged operators, each part of the step by its own.

Contract: the arguments suit the operators (`attention` has looked); what the step says of tables and lengths is
taken as it is.
"""

from __future__ import annotations

import torch

import hf_paged_kernels as kernels

from .lazy import LazyKV
from .packed_metadata import PackedGroup


def attend_packed(group: PackedGroup, query, key: LazyKV, arguments: dict) -> torch.Tensor:
    """Decoding rows, whose tokens come first, and chunks each by their own operator."""
    pages = key.layer.pool.pages(key.layer.layer_idx)
    key_cache, value_cache = pages.key_cache, pages.value_cache
    arguments = {**arguments, "k_scale": pages.k_scale, "v_scale": pages.v_scale}
    packed, count, out = pages.queries(query[0].transpose(0, 1)), group.step.num_decode, []
    if count:
        tensors = (packed[:count], key_cache, value_cache, group.decode_tables, group.decode_lens)
        options = {**arguments, "max_seq_len": group.max_decode_len}
        if group.shared is None or arguments["sliding_window"]:
            out.append(kernels.paged_decode(*tensors, **options))
        else:
            del options["sliding_window"]
            out.append(kernels.paged_decode_shared(*tensors, *group.shared, **options))
    if group.step.chunks:
        prefill = kernels.paged_prefill(
            packed[count:],
            key_cache,
            value_cache,
            group.prefill_tables,
            group.query_start_loc,
            group.prefill_lens,
            max_seq_len=group.max_prefill_len,
            max_query_len=group.max_query_len,
            **arguments,
        )
        out.append(prefill)
    return (out[0] if len(out) == 1 else torch.cat(out))[None]
