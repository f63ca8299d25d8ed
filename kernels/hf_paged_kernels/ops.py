"""The operators as `torch.library` custom ops of the namespace `hf_paged`, with fakes, and the counts of calls.

Contract: torch.compile, export and CUDA graphs see four opaque operators with known shapes; when one runs, `dispatch`
chooses the backend. Through the lower-level `Library` a call costs about 4 us, where `custom_op` costs 30.
An operator records no autograd: the public functions run it under no_grad.

`call` goes past torch's dispatcher where nothing could be watching: a decode step of a small model is a hundred calls
of 20 us, and the dispatcher would take a third of that again.
"""

import threading

import torch

from . import cpu, dispatch
from .dispatch import OPS

_ATTENTION = (
    "float scale, SymInt sliding_window, float softcap, Tensor? sinks, Tensor? seq_starts, bool return_lse, "
    "SymInt? max_seq_len"
)
_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_SCHEMAS = {
    "reshape_and_cache": "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
    "copy_blocks": "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor pairs, Tensor(c!)? k_scale=None, "
    "Tensor(d!)? v_scale=None) -> ()",
    "paged_decode": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
    f"{_ATTENTION}, {_SCALES}) -> (Tensor, Tensor)",
    "paged_prefill": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    f"Tensor query_start_loc, Tensor seq_lens, {_ATTENTION}, SymInt? max_query_len, {_SCALES}) -> "
    "(Tensor, Tensor)",
}

_calls = dict.fromkeys(OPS, 0)
_calls_lock = threading.Lock()


def op_calls() -> dict[str, int]:
    """How often each operator ran in this process since the last reset (a replayed graph is not seen)."""
    with _calls_lock:
        return dict(_calls)


def reset_op_calls() -> None:
    """Set every count of `op_calls` to 0."""
    with _calls_lock:
        _calls.update(dict.fromkeys(OPS, 0))


def call(op: str, tensors: tuple, options: dict | None = None):
    """Run an operator on plain tensors at once; through `torch.ops` where something traces or intercepts.

    Args:
        options: of attention, those of its `OPTIONS` that are given.
    """
    if type(tensors[0]) in _PLAIN and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
        caches = tensors[2:4] if op == "reshape_and_cache" else tensors[:2] if op == "copy_blocks" else tensors[1:3]
        return _run(op, *caches, tensors, options or {})
    with torch.no_grad():
        result = getattr(torch.ops.hf_paged, op)(*tensors, **(options or {}))
    return result if options is None or options["return_lse"] else result[0]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_decode(query, key_cache, *arguments, **scales):
    """paged_decode by the C library where all is as it mostly is, or None: then somebody must look closer.

    A decode step of a small model calls it once a layer. Checks, choice and call in one go take 10 us of Python
    instead of 25, as long as the kernel itself for one sequence of 128 tokens.
    """
    if (
        torch.compiler.is_compiling()  # first: dynamo does not trace what `forced` does
        or dispatch.forced() not in _C
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    out = cpu.plain_decode(query, key_cache, *arguments, **scales)
    if out is not None:
        with _calls_lock:
            _calls["paged_decode"] += 1
    return out


_C = (None, "c")


def _run(op: str, key_cache: torch.Tensor, value_cache: torch.Tensor, tensors: tuple, options: dict):
    """Run an operator on the backend for these caches and count it."""
    device = key_cache.device
    head_dim = 0 if device.type == "cpu" else max(key_cache.shape[3], value_cache.shape[3])
    name, _ = dispatch.choose(device, tensors[0].dtype, head_dim)
    result = getattr(dispatch.BACKENDS[name], op)(*tensors, **options)
    with _calls_lock:
        _calls[op] += 1
    return result


def _write(key, value, key_cache, value_cache, slot_mapping, *scales):
    _run("reshape_and_cache", key_cache, value_cache, (key, value, key_cache, value_cache, slot_mapping, *scales), {})


def _copy(key_cache, value_cache, pairs, *scales):
    _run("copy_blocks", key_cache, value_cache, (key_cache, value_cache, pairs, *scales), {})


def _decode(query, key_cache, value_cache, block_tables, seq_lens, *options):
    return _attention("paged_decode", (query, key_cache, value_cache, block_tables, seq_lens), options)


def _prefill(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *options):
    tensors = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens)
    return _attention("paged_prefill", tensors, options)


_SHARED = ("scale", "sliding_window", "softcap", "sinks", "seq_starts", "return_lse", "max_seq_len")
OPTIONS = {
    "paged_decode": (*_SHARED, "k_scale", "v_scale"),
    "paged_prefill": (*_SHARED, "max_query_len", "k_scale", "v_scale"),
}


def _attention(op, tensors, values):
    options = dict(zip(OPTIONS[op], values, strict=False))  # torch leaves scales out where they are None
    result = _run(op, tensors[1], tensors[2], tensors, options)
    # An operator's outputs are fixed: without return_lse the second one is empty.
    return result if options["return_lse"] else (result, tensors[0].new_empty(0, dtype=torch.float32))


def _fake_decode(query, key_cache, value_cache, block_tables, seq_lens, *options):
    return _fake_attention(query, value_cache, options)


def _fake_prefill(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *options):
    return _fake_attention(query, value_cache, options)


def _fake_attention(query, value_cache, options):
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
    return_lse = options[_SHARED.index("return_lse")]
    return out, query.new_empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32)


def _nothing(*tensors):
    """The fake of an operator that only writes."""


_IMPLEMENTATIONS = {
    "reshape_and_cache": _write,
    "copy_blocks": _copy,
    "paged_decode": _decode,
    "paged_prefill": _prefill,
}
_FAKES = {
    "reshape_and_cache": _nothing,
    "copy_blocks": _nothing,
    "paged_decode": _fake_decode,
    "paged_prefill": _fake_prefill,
}
_library = torch.library.Library("hf_paged", "DEF")
for _op, _schema in _SCHEMAS.items():
    _library.define(_op + _schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_op, _IMPLEMENTATIONS[_op], "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_paged::{_op}", _FAKES[_op], lib=_library)
