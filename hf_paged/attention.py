"""The hf_paged attention and mask functions.

Contract: the attention function reads blocks through the paged operators wherever the arguments are
ones that those know (causal or sliding window, left padding, scale, softcap, sinks), and otherwise
hands everything, unchanged and dense, to the implementation that the model had before. Nothing that
reaches it is dropped. In a packed forward the same holds for each sequence by itself; what cannot be told
apart by sequences raises PackingError.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_paged_kernels as kernels

from .lazy import LazyKV, LazyMask
from .packed_attention import attend_packed
from .packed_metadata import PackedGroup, PackingError
from .switch import NAME, switches
from .traced_cache import PagedKV

# Arguments of attention calls that do not change the result: bookkeeping, and what flash attention needs
# to unpack batches without a cache. Any other argument with a value sends the call to the dense path.
_WITHOUT_EFFECT = frozenset(
    "position_ids cache_position position_embeddings output_attentions output_hidden_states use_cache return_dict "
    "output_router_logits logits_to_keep token_type_ids mm_token_type_ids cu_seq_lens_q cu_seq_lens_k max_length_q "
    "max_length_k num_items_in_batch labels past_key_values is_first_iteration inputs_embeds input_ids "
    "block_sequence_ids deterministic".split()
)

# What the paged operators know besides.
_BY_OPERATORS = _WITHOUT_EFFECT | {"softcap", "s_aux", "sliding_window", "is_causal"}

calls = Counter()  # how often attention went "paged", "dense" (gathered K/V) or "uncached"


# The mask


def _pattern(mask_function: Callable) -> int | None:
    """Window of a plain sliding-window mask function, 0 for a plain causal one, None for any other."""
    if mask_function is causal_mask_function:
        return 0
    parts = _closure(mask_function, "and_masks.<locals>.and_mask").get("mask_functions")
    if parts is None or len(parts) != 2 or causal_mask_function not in parts:
        return None
    overlay = parts[0] if parts[1] is causal_mask_function else parts[1]
    window = _closure(overlay, "sliding_window_overlay.<locals>.inner_mask").get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _closure(function: Callable, qualname: str) -> dict:
    code = getattr(function, "__code__", None)
    here = (causal_mask_function.__module__, qualname)
    if code is None or (function.__module__, function.__qualname__) != here:
        return {}
    cells = function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def hf_paged_mask(**mask_kwargs):
    """Mask function of the `AttentionMaskInterface`: a LazyMask, or None where there is nothing to mask."""
    if torch.compiler.is_dynamo_compiling():  # of this call: is_compiling() is true while any thread compiles
        # No key at all: a TracedCache, whose sequences the operators keep apart.
        return None if mask_kwargs["kv_length"] == 0 else eager_mask(**mask_kwargs)
    before = switches.before(mask_kwargs.get("config"))
    if before is not None and not switches.in_paged_call:
        # Another thread switched this config; this call is not its own.
        return _mask_function(before)(**mask_kwargs)
    mask_kwargs = {"q_offset": 0, "kv_offset": 0, "attention_mask": None, "device": "cpu", **mask_kwargs}
    offsets_known = isinstance(mask_kwargs["q_offset"], int) and isinstance(mask_kwargs["kv_length"], int)
    pattern = _pattern(mask_kwargs["mask_function"]) if offsets_known and not mask_kwargs.get("use_vmap") else None
    mask, packed = None, switches.packed_step
    if packed is not None:
        lazy = LazyMask(pattern, mask_kwargs, _no_packed_mask)
        lazy.packed = packed
        return lazy
    if pattern is None:
        mask = eager_mask(**mask_kwargs)
        if mask is None:
            return None
    else:
        switches.causal_mask_made(mask_kwargs["attention_mask"])
    lazy = LazyMask(pattern, mask_kwargs, lambda name: _mask_function(name)(**mask_kwargs))
    lazy._dense = mask
    return lazy


def _no_packed_mask(implementation: str):
    raise PackingError("the model looks into its attention mask, which packed sequences do not have as a tensor")


def _mask_function(implementation: str) -> Callable:
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:  # transformers makes no mask for such a one
        return lambda **mask_kwargs: None
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation]


# The attention


def hf_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function of the `AttentionInterface`.

    Args:
        module: the attention layer.
        query: `[batch, num_heads, T, head_dim_k]`.
        key, value: `[batch, num_kv_heads, kv_length, head_dim]`, lazy where they lie in blocks.
        attention_mask: a LazyMask, any dense mask, or None for plain causal attention.
        scaling: factor of the scores; None means head_dim ** -0.5.
        dropout: probability of dropping an attention weight.
        kwargs: what else the model passes (softcap, s_aux, sliding_window, position_bias, ...).
    Returns:
        `[batch, T, num_heads, head_dim_v]`, and the attention weights or None.
    """
    if isinstance(key, PagedKV):
        return _traced(module, query, key, value, scaling, dropout, kwargs), None
    group = _packed_group(module, key, value, attention_mask)
    if group is not None:
        return _packed(group, module, query, key, value, attention_mask, scaling, dropout, kwargs)
    if _is_paged(module, query, key, value, attention_mask, dropout, kwargs):
        calls["paged"] += 1
        return _paged(query, key, value, attention_mask, scaling, kwargs), None
    calls["dense" if isinstance(key, LazyKV) or isinstance(value, LazyKV) else "uncached"] += 1
    return _dense(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _is_paged(module, query, key, value, mask, dropout, kwargs) -> bool:
    """Whether the paged operators can serve this call."""
    if not (isinstance(key, LazyKV) and isinstance(value, LazyKV)) or switches.wants_weights:
        return False
    if not _suits_operators(module, query, key, value, key.layer.rows.pool, dropout, kwargs):
        return False
    if query.shape[2] != key.step.num_columns:
        return False
    if mask is None:  # to eager attention that means every key, to sdpa a causal mask
        return query.shape[2] == 1 or switches.before(getattr(module, "config", None)) != "eager"
    if not isinstance(mask, LazyMask) or mask.shape[-1] != key.shape[2] or mask.q_offset != key.step.first_column:
        return False
    window = key.layer.sliding_window if key.layer.is_sliding else 0
    if mask.pattern is None or (window and not 0 < mask.pattern <= window):
        return False  # the layer keeps less than this mask shows
    return mask.first_real_columns() is not False


def _suits_operators(module, query, key: LazyKV, value: LazyKV, pool, dropout, kwargs) -> bool:
    """Whether the operators know everything about a call but its mask and its number of queries."""
    if key.step is not value.step or key.layer is not value.layer or query.shape[3] != key.shape[3]:
        return False
    if not query.dtype == key.dtype == value.dtype == pool.key.dtype:
        return False
    return query.shape[1] % key.shape[1] == 0 and _operators_know(module, dropout, kwargs)


def _operators_know(module, dropout, kwargs) -> bool:
    """Whether the operators know every argument of a call."""
    is_causal = kwargs.get("is_causal")
    if dropout or (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        return False
    return all(argument is None or name in _BY_OPERATORS for name, argument in kwargs.items())


def _arguments(query, mask, scaling, kwargs) -> dict:
    """What every operator is told of a call."""
    window = mask.pattern if mask is not None else kwargs.get("sliding_window") or 0
    return {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "sliding_window": int(window),
        "softcap": float(kwargs.get("softcap") or 0.0),
        "sinks": kwargs.get("s_aux"),
    }


def _paged(query, key, value, mask, scaling, kwargs) -> torch.Tensor:
    layer, step = key.layer, key.step
    pages = layer.rows.pool.pages(layer.layer_idx)
    key_cache, value_cache, query = pages.key_cache, pages.value_cache, pages.queries(query)
    arguments = _arguments(query, mask, scaling, kwargs) | {"k_scale": pages.k_scale, "v_scale": pages.v_scale}
    arguments.update(seq_starts=_seq_starts(mask, step), max_seq_len=step.max_seq_len)
    batch, heads, num_columns, _ = query.shape
    query_start_loc, real, max_query_len = step.packed_queries()
    if num_columns == 1 and real is None:
        out = kernels.paged_decode(
            query[:, :, 0], key_cache, value_cache, step.block_tables, step.seq_lens, **arguments
        )
        return out[:, None]
    packed = query.transpose(1, 2).reshape(batch * num_columns, heads, query.shape[-1])
    out = kernels.paged_prefill(
        packed if real is None else packed[real],
        key_cache,
        value_cache,
        step.block_tables,
        query_start_loc,
        step.seq_lens,
        max_query_len=max_query_len,
        **arguments,
    )
    if real is not None:
        # Queries of left padding have no key to attend to; nothing reads their result.
        out = out.new_zeros((batch * num_columns, *out.shape[1:])).index_copy_(0, real, out)
    return out.view(batch, num_columns, heads, out.shape[-1])


def _seq_starts(mask: LazyMask | None, step) -> torch.Tensor | None:
    """First attended position of each row among those it keeps, `[batch]` int32, or None if that is 0."""
    columns = mask.first_real_columns() if mask is not None else None
    if columns is None:
        columns = torch.zeros(len(step.row_starts), dtype=torch.int64)
    _refuse_dropped_columns(columns, step)
    starts = columns - torch.from_numpy(step.row_starts)
    if not (starts > 0).any():
        return None
    return starts.clamp(min=0).to(step.seq_lens.device, torch.int32)


def _refuse_dropped_columns(first_real: torch.Tensor, step) -> None:
    """Raise ValueError where a mask shows left padding that the cache did not keep."""
    starts = torch.from_numpy(step.row_starts)
    # A row whose padding ends further on than this forward has stored nothing yet.
    shown = (first_real < starts) & (starts < step.last_column)
    if shown.any():
        row = int(shown.nonzero()[0, 0])
        raise ValueError(
            f"attention_mask shows column {int(first_real[row])} of row {row}, but this cache was told that the row's "
            f"first {int(starts[row])} columns are padding and did not keep them; pass the same attention_mask"
        )


# Packed forwards


def _packed_group(module, key, value, mask) -> PackedGroup | None:
    """The group of layers whose packed sequences this call attends to; None outside a packed forward."""
    for states in (key, value):
        if isinstance(states, LazyKV) and isinstance(states.step, PackedGroup):
            return states.step
    step = switches.packed_step
    if step is None:
        return None
    # The model has made other keys and values of those that it was given; what they cover tells whose they were.
    if isinstance(mask, LazyMask) and mask.packed is step:
        groups = [group for group in step.groups if group.kv_ranges()[2] == key.shape[2]]
        groups.sort(key=lambda group: group.sliding_window != (mask.pattern or 0))
        if groups:
            return groups[0]
    raise PackingError(f"{type(module).__name__} attends to keys and values that are not those of packed sequences")


def _packed(group: PackedGroup, module, query, key, value, mask, scaling, dropout, kwargs):
    if isinstance(mask, LazyMask) and (mask.pattern is None or mask.packed is not group.step):
        raise PackingError(f"{type(module).__name__} masks in a way that is not known to keep sequences apart")
    lazy = isinstance(key, LazyKV) and isinstance(value, LazyKV)
    if lazy and _suits_operators(module, query, key, value, key.layer.pool, dropout, kwargs):
        if query.shape[2] == group.step.num_tokens and (
            mask is None or not group.sliding_window or 0 < mask.pattern <= group.sliding_window
        ):
            calls["packed"] += 1
            arguments = _arguments(query, mask, scaling, kwargs)
            group.step.note(key.layer.layer_idx, arguments["sliding_window"])
            return attend_packed(group, query, key, arguments), None
    calls["packed_dense"] += 1
    group.step.note(None, 0)
    return _packed_dense(group, module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)


def _traced(module, query, key: PagedKV, value, scaling, dropout, kwargs) -> torch.Tensor:
    """A decoding step that torch.compile traces; its window is that of the same layer outside of a trace."""
    if not _operators_know(module, dropout, kwargs):
        raise PackingError(f"{type(module).__name__} attends in a way that the paged operators do not know")
    key_cache, value_cache, k_scale, v_scale, tables, lens, window = key.pages(value)
    query = key.queries(query)
    arguments = {**_arguments(query, None, scaling, kwargs), "sliding_window": window}
    arguments.update(k_scale=k_scale, v_scale=v_scale)
    arguments["max_seq_len"] = tables.shape[1] * key_cache.shape[2]  # a graph does not know the longest
    return kernels.paged_decode(query[0].transpose(0, 1), key_cache, value_cache, tables, lens, **arguments)[None]


def _packed_dense(group: PackedGroup, module, query, key, value, mask, **kwargs):
    """The model's own attention, one sequence after the other, over the keys and values that it sees."""
    starts, _ = group.step.ranges()
    firsts, ends, total = group.kv_ranges()
    if not isinstance(mask, LazyMask) or key.shape[2] != total or query.shape[2] != group.step.num_tokens:
        raise PackingError(
            f"{type(module).__name__} attends with {query.shape[2]} queries to {key.shape[2]} keys, a packed step of "
            f"{group.step.num_tokens} tokens has {total}" + ("" if isinstance(mask, LazyMask) else ", without a mask")
        )
    outputs, query_at, key_at = [], 0, 0
    for start, first, end in zip(starts, firsts, ends, strict=True):
        queries, keys = slice(query_at, query_at + end - start), slice(key_at, key_at + end - first)
        here = {**mask.mask_kwargs, "batch_size": 1, "attention_mask": None, "q_offset": start, "kv_offset": first}
        here.update(q_length=end - start, kv_length=end - first)
        own = LazyMask(mask.pattern, here, lambda name, here=here: _mask_function(name)(**here))
        out, _ = _dense(module, query[:, :, queries], _part(key, keys), _part(value, keys), own, **kwargs)
        outputs.append(out)
        query_at, key_at = queries.stop, keys.stop
    return torch.cat(outputs, dim=1), None


def _part(states: torch.Tensor, tokens: slice) -> torch.Tensor:
    return (states.dense() if isinstance(states, LazyKV) else states)[:, :, tokens]


# The dense path


def _dense(module, query, key, value, attention_mask, **kwargs):
    """The implementation that the model had before, over dense K/V."""
    if isinstance(key, LazyKV) and isinstance(attention_mask, LazyMask) and attention_mask.attention_mask is not None:
        _refuse_dropped_columns(attention_mask.attention_mask.int().argmax(dim=1).cpu(), key.step)
    if isinstance(key, LazyKV):
        key = key.dense()
    if isinstance(value, LazyKV):
        value = value.dense()
    file = sys.modules.get(type(module).__module__)
    eager = getattr(file, "eager_attention_forward", None)
    name = switches.before(getattr(module, "config", None))
    if name is None:  # the user chose hf_paged for good
        name = _chosen(module, eager, kwargs)
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.build(name)
    interface = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    function = eager if name == "eager" and eager is not None else interface.get_interface(name, eager)
    if function is None:
        raise ValueError(f"{type(module).__name__} has no eager attention to fall back to; load the model with sdpa")
    return function(module, query, key, value, attention_mask, **kwargs)


def _chosen(module, eager: Callable | None, kwargs: dict) -> str:
    """sdpa, or eager where only that knows an argument of this call.

    Raises:
        ValueError: neither does.
    """
    by_sdpa = _WITHOUT_EFFECT | {"scaling", "dropout", "sliding_window", "is_causal", "position_bias"}
    unknown = [name for name, value in kwargs.items() if value is not None and name not in by_sdpa]
    if not unknown:
        return "sdpa"
    by_eager = set(inspect.signature(eager).parameters) if eager is not None else set()
    if hasattr(module, "sinks"):  # eager attention with sinks reads them from the module
        by_eager.add("s_aux")
    for name in unknown:
        if name not in by_eager:
            raise ValueError(f"hf_paged attention does not know {name!r}, nor has {type(module).__name__} an eager one")
    return "eager"


def register_attention() -> None:
    AttentionInterface.register(NAME, hf_paged_attention)
    AttentionMaskInterface.register(NAME, hf_paged_mask)


def unregister_attention() -> None:
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
