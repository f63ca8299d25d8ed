"""Attention problems over a poisoned pool, and what every backend of them is held to.

Contract: `build` makes one call of paged_decode or paged_prefill in which every slot that no query may see holds
NaN or inf, every table entry that is not needed holds -1 or any block, and every query row that sees nothing holds
NaN. `check` runs a backend on it and raises AssertionError unless out and lse keep within `limits` of the reference
in float64, started from the same numbers, already rounded to the storage type. `dense` computes the expected
values once more without the reference.

Bounds, for each element, with M = max|ref| over the call and u half a unit in the last place of 1 (the most by
which rounding to nearest changes a number, relative to it: 2**-24, 2**-8 and 2**-11):

    float32    1e-5 * M
    others     1e-5 * M + u * |ref|: sums and softmax run in float32 as above, then the output is rounded once
    ROUNDS_WEIGHTS    + u * A more, where A is the same attention over |V|: such a backend rounds each weight
                      to the storage type for its matrix product, hence sum |w * u * v| at most

lse is float32 in every case: 1e-5 * max(1, |lse|).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

import hf_paged_kernels as kernels

NAN, INF = float("nan"), float("inf")
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROUNDS_WEIGHTS = {"triton"}


@dataclass
class Case:
    """One call; `rows` says for each query row its sequence and position, None for a row of no sequence."""

    op: str
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    index: tuple  # block_tables, then query_start_loc where the operator takes it, then seq_lens
    options: dict
    rows: list = field(repr=False)
    key: list = field(repr=False)  # of each sequence, [length, KH, Dk]
    value: list = field(repr=False)

    def sees(self, seq: int, position: int) -> range:
        """Positions that the query at `position` of a sequence sees."""
        starts, window = self.options["seq_starts"], self.options["sliding_window"]
        first = 0 if starts is None else int(starts[seq])
        return range(max(first, position - window + 1 if window else 0), position + 1)

    def double(self) -> Case:
        tensors = {name: getattr(self, name).double() for name in ("query", "key_cache", "value_cache")}
        sinks = self.options["sinks"]
        return replace(self, **tensors, options=self.options | {"sinks": sinks if sinks is None else sinks.double()})

    def run(self, backend: str, **changes):
        """What a backend returns, as (out, lse); lse is None where the case does not ask for it."""
        options = self.options | changes
        with kernels.backend(backend):
            got = getattr(kernels, self.op)(self.query, self.key_cache, self.value_cache, *self.index, **options)
        return got if options["return_lse"] else (got, None)


def build(
    lens,
    chunks=None,
    *,
    head_dim=8,
    head_dim_v=None,
    block_size=4,
    kv_heads=2,
    group=3,
    dtype=torch.float32,
    window=0,
    softcap=0.0,
    sinks=False,
    starts=None,
    lse=True,
    scale=None,
    seed=0,
    device="cpu",
) -> Case:
    """A case of sequences of these lengths: paged_decode, or paged_prefill of the last chunks[s] tokens of each.

    The rest (block ids, strides, poisons, rows of no sequence, host bounds) is drawn from the seed.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, head_dim_v = kv_heads * group, head_dim_v or head_dim
    rows = [(s, n - 1) if n else None for s, n in enumerate(lens)]
    first_queries = [n - 1 if n else 0 for n in lens]
    if chunks is not None:
        before, after = rng.choice([0, 2]), rng.choice([0, 3])
        ranges = [[(s, p) for p in range(n - c, n)] for s, (n, c) in enumerate(zip(lens, chunks, strict=True))]
        rows = [None] * before + sum(ranges, []) + [None] * after
        first_queries = [n - c for n, c in zip(lens, chunks, strict=True)]

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    key = [randn(n, kv_heads, head_dim) for n in lens]
    value = [randn(n, kv_heads, head_dim_v) for n in lens]

    # The pool: poison, then what some query sees. A sequence's queries together see one range of positions.
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=generator)
    key_cache = torch.full((num_blocks, kv_heads, block_size, head_dim), rng.choice([NAN, INF]), dtype=dtype)
    value_cache = torch.full((num_blocks, kv_heads, block_size, head_dim_v), rng.choice([NAN, -INF]), dtype=dtype)
    table = torch.randint(-1, num_blocks, (len(lens), max(counts, default=0) + rng.randint(0, 2)), generator=generator)
    for s, n in enumerate(lens):
        low = max(first_queries[s] - window + 1 if window else 0, starts[s] if starts else 0, 0)
        if low >= n or (chunks is not None and chunks[s] == 0):
            continue
        positions = torch.arange(low, n)
        columns = slice(low // block_size, counts[s])
        taken, free = free[: counts[s]], free[counts[s] :]
        table[s, columns] = taken[columns]
        blocks, offsets = taken[positions // block_size], positions % block_size
        key_cache[blocks, :, offsets] = key[s][low:]
        value_cache[blocks, :, offsets] = value[s][low:]

    index = [table.int()]
    options = dict(scale=scale or head_dim**-0.5, sliding_window=window, softcap=softcap, return_lse=lse)
    options["sinks"] = strided(2 * randn(heads, dtype=rng.choice([dtype, torch.float32])) if sinks else None, rng)
    options["seq_starts"] = strided(torch.tensor(starts, dtype=torch.int32) if starts else None, rng)
    options["max_seq_len"] = rng.choice([None, *(max(lens, default=0) + spare for spare in (0, 19))])
    if chunks is not None:
        bounds = torch.tensor([before, *chunks]).cumsum(0).int()
        index.append(bounds)
        options["max_query_len"] = rng.choice([None, *(max(chunks, default=0) + spare for spare in (0, 5))])
    index.append(torch.tensor(lens, dtype=torch.int32))
    index = tuple(strided(tensor, rng) for tensor in index)
    name = "paged_decode" if chunks is None else "paged_prefill"
    case = Case(name, randn(len(rows), heads, head_dim), key_cache, value_cache, index, options, rows, key, value)
    blind = [t for t, row in enumerate(rows) if row is None or not case.sees(*row)]
    case.query[blind] = NAN
    case.query = strided(case.query, rng)
    return on(case, device)


def on(case: Case, device) -> Case:
    """The case with what an operator reads on another device, strides kept."""
    tensors = {name: moved(getattr(case, name), device) for name in ("query", "key_cache", "value_cache")}
    options = {name: moved(option, device) for name, option in case.options.items()}
    return replace(case, **tensors, index=tuple(moved(tensor, device) for tensor in case.index), options=options)


def moved(value, device):
    """A tensor on another device under the strides that it has; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type == torch.device(device).type:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device).copy_(value)


def strided(tensor: torch.Tensor | None, rng: random.Random) -> torch.Tensor | None:
    """The same values: as they were, in a slice of something wider, with dimensions swapped, or two steps apart."""
    layout = rng.randrange(4) if tensor is not None else 0
    if layout == 1:
        size = tensor.shape[-1]
        return torch.cat([tensor, tensor, tensor], -1)[..., size : 2 * size]
    if layout == 2:
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == 3:
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]
    return tensor


def expected(case: Case):
    """(out, lse) of the reference in float64, from the numbers that the case holds."""
    return case.double().run("reference", return_lse=True)


def dense(case: Case):
    """The same without pages, tiles or the reference: softmax over whole rows, in float64."""
    num_rows, heads, _ = case.query.shape
    out = torch.zeros(num_rows, heads, case.value_cache.shape[3], dtype=torch.float64)
    lse = torch.full((num_rows, heads), -INF, dtype=torch.float64)
    sinks = case.options["sinks"]
    if sinks is not None:
        lse[:] = sinks
    for t, row in enumerate(case.rows):
        seen = case.sees(*row) if row else []
        if not seen:
            continue
        window = slice(seen[0], seen[-1] + 1)
        k, v = (x[row[0]][window].double().repeat_interleave(heads // x[0].shape[1], 1) for x in (case.key, case.value))
        logits = case.options["scale"] * torch.einsum("hd,nhd->hn", case.query[t].double(), k)
        if cap := case.options["softcap"]:
            logits = cap * torch.tanh(logits / cap)
        extra = logits if sinks is None else torch.cat([logits, sinks.double()[:, None]], 1)
        lse[t] = extra.exp().sum(1).log()
        out[t] = torch.einsum("hn,nhd->hd", (logits - lse[t][:, None]).exp(), v)
    return out, lse


def limits(case: Case, backend: str, ref: torch.Tensor) -> torch.Tensor:
    """By how much each element of out may differ from ref."""
    half_ulp = HALF_ULP[case.query.dtype]
    limit = 1e-5 * ref.abs().max() + half_ulp * ref.abs() if ref.numel() else ref
    if half_ulp and backend in ROUNDS_WEIGHTS:
        limit = limit + half_ulp * expected(replace(case, value_cache=case.value_cache.abs()))[0]
    return limit


def check(case: Case, backend: str, wanted=None, label: str = "") -> None:
    """Hold a backend to its bounds on a case."""
    ref, ref_lse = expected(case) if wanted is None else wanted
    out, lse = case.run(backend)
    assert out.dtype == case.query.dtype and out.shape == ref.shape, (label, out.dtype, out.shape)
    within(out, ref, limits(case, backend, ref), f"{label} out")
    if case.options["return_lse"]:
        assert lse.dtype == torch.float32 and lse.shape == ref_lse.shape, (label, lse.dtype, lse.shape)
        within(lse, ref_lse, 1e-5 * ref_lse.abs().clamp(min=1), f"{label} lse")


def within(got: torch.Tensor, ref: torch.Tensor, limit: torch.Tensor, label: str) -> None:
    error = torch.where(got == ref, 0, (got.double() - ref).abs())  # equal infinities differ by nothing
    wrong = ~(error <= limit)  # NaN included
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} elements out of bounds, the first at {list(at)}: "
            f"{got[at].item():.9g}, expected {ref[at].item():.9g} +- {limit.expand_as(ref)[at].item():.2g}"
        )
