"""Attention over paged K/V against an oracle written here, independently, in float64.

Every pool starts as NaN and only what an operator may read is filled in, so reading a wrong slot shows.

Bounds. float32: 1e-5 * max(1, max|ref|), the rounding of sums over some hundred terms. bfloat16: both sides
start from the same bfloat16 numbers and accumulate in float32, so what differs is the last rounding to 8
significant bits, 2**-8 of the value, plus the float32 bound.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_paged_kernels as kernels

F32, BF16, NAN = torch.float32, torch.bfloat16, float("nan")


@pytest.fixture(autouse=True, params=[name for name in ("reference", "c") if name in kernels.BACKENDS])
def each_backend(request):
    with kernels.backend(request.param):
        yield


# -- the oracle: one query of one head at a time --------------------------------------------------


def attend_one(q, keys, values, scale, softcap, sink):
    """q [D] over lists of rows, float64 -> out [Dv] and lse; nothing to see gives None."""
    logits = [scale * float(q @ k) for k in keys]
    if softcap:
        logits = [softcap * math.tanh(x / softcap) for x in logits]
    everything = logits + ([] if sink is None else [sink])
    if not everything:
        return None, -math.inf
    lse = torch.logsumexp(torch.tensor(everything, dtype=torch.float64), 0).item()
    return sum((math.exp(x - lse) * v for x, v in zip(logits, values, strict=True)), start=0.0), lse


KNOWN = {}  # what the oracle says of the grids: it takes longer than the backends, all of which are held to it


def oracle(case, positions_of, name=None):
    """out [T,H,Dv] and lse [T,H] of a case; positions_of: (sequence, position) of each query row.

    A case that has a name is worked out once.
    """
    if name in KNOWN:
        return KNOWN[name]
    num_tokens, num_heads, _ = case.query.shape
    out = torch.zeros(num_tokens, num_heads, case.dv, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for t, (seq, position) in enumerate(positions_of):
        seen = [p for p in range(case.seq_lens[seq]) if case.sees(seq, position, p)]
        for h in range(num_heads):
            kv_head = h // (num_heads // case.kv_heads)
            keys = [case.key[seq][p, kv_head].double() for p in seen]
            values = [case.value[seq][p, kv_head].double() for p in seen]
            sink = None if case.sinks is None else case.sinks[h].item()
            q = case.query[t, h].double()
            got, lse[t, h] = attend_one(q, keys, values, case.scale, case.softcap, sink)
            if seen:
                out[t, h] = got
    if name is not None:
        KNOWN[name] = out, lse
    return out, lse


class Case:
    """Sequences in a poisoned pool: random block tables, NaN in every slot that no query sees."""

    def __init__(self, seed, seq_lens, query_lens=None, *, kv_heads=2, group=3, d=8, dv=None, block=4,
                 dtype=F32, window=0, softcap=0.0, sinks=False, starts=None, spare_blocks=3):  # fmt: skip
        gen = torch.Generator().manual_seed(seed)
        self.seq_lens, self.query_lens = list(seq_lens), list(query_lens or [1] * len(seq_lens))
        self.kv_heads, self.block, self.window, self.softcap = kv_heads, block, window, softcap
        self.dv, self.scale, self.starts = dv or d, d**-0.5, starts
        heads, num_seqs = kv_heads * group, len(seq_lens)

        def randn(*shape):
            return torch.randn(*shape, generator=gen).to(dtype)

        self.query = randn(sum(self.query_lens), heads, d)
        self.sinks = randn(heads) if sinks else None
        self.key = [randn(n, kv_heads, d) for n in self.seq_lens]
        self.value = [randn(n, kv_heads, self.dv) for n in self.seq_lens]

        counts = [-(-n // block) for n in self.seq_lens]
        num_blocks = sum(counts) + spare_blocks
        ids = torch.randperm(num_blocks, generator=gen).tolist()
        self.key_cache = torch.full((num_blocks, kv_heads, block, d), NAN, dtype=dtype)
        self.value_cache = torch.full((num_blocks, kv_heads, block, self.dv), NAN, dtype=dtype)
        self.block_tables = torch.full((num_seqs, max(counts, default=0) + 1), -1, dtype=torch.int32)
        for seq, count in enumerate(counts):
            for b in range(count):
                end = self.seq_lens[seq]
                queries = range(end - self.query_lens[seq], end)
                held = range(b * block, min((b + 1) * block, end))
                used = [p for p in held if any(self.sees(seq, q, p) for q in queries)]
                block_id = ids.pop()
                if used or block_id % 2:  # a block that nobody sees: all NaN, or given back and -1
                    self.block_tables[seq, b] = block_id
                for p in used:
                    self.key_cache[block_id, :, p % block] = self.key[seq][p]
                    self.value_cache[block_id, :, p % block] = self.value[seq][p]

    def sees(self, seq, q, p):
        start = self.starts[seq] if self.starts else 0
        return start <= p <= q and (self.window == 0 or q - p < self.window)

    def run(self, op=kernels.paged_decode, seq_lens=None, **changes):
        lens, starts = ints(seq_lens or self.seq_lens), ints(self.starts) if self.starts else None
        tensors = [self.query, self.key_cache, self.value_cache, self.block_tables, lens]
        if op is kernels.paged_prefill:
            tensors.insert(4, ints([0, *torch.tensor(self.query_lens).cumsum(0).tolist()]))
        options = dict(scale=self.scale, sliding_window=self.window, softcap=self.softcap)
        options |= dict(sinks=self.sinks, seq_starts=starts, return_lse=True)
        return op(*tensors, **(options | changes))

    def check(self, op=kernels.paged_decode, name=None, **changes):
        lengths = zip(self.seq_lens, self.query_lens, strict=True)
        positions = [(s, p) for s, (n, q) in enumerate(lengths) for p in range(n - q, n)]
        out, lse = self.run(op, **changes)
        ref, ref_lse = oracle(self, positions, name)
        assert out.dtype == self.query.dtype and lse.dtype == F32
        assert_close(out, ref)
        assert_close(lse, ref_lse)
        planned = self.run(op, return_lse=False, max_seq_len=max(self.seq_lens), **changes)
        assert_close(planned, ref)  # sizes from the host, without a sync


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def assert_close(got, ref):
    assert got.shape == ref.shape and not got.isnan().any()
    finite = ref.isfinite()
    assert torch.equal(got.isfinite(), finite)
    if finite.any():
        largest = ref[finite].abs().max().item()
        bound = 1e-5 * max(1.0, largest) + (2**-8 * largest if got.dtype == BF16 else 0)
        assert (got.double() - ref)[finite].abs().max().item() <= bound


# -- grids ----------------------------------------------------------------------------------------


AXES = dict(
    d=[8, 24, 80, 96, 120, 256], dv=[None, None, 16], block=[1, 4, 16, 17, 64, 256], kv_heads=[1, 2, 4],
    group=[1, 3], dtype=[F32, BF16], window=[0, 0, 1, 5, 16, 33], softcap=[0.0, 1.5], sinks=[False, True],
    starts=[None, True],
)  # fmt: skip


def grid(count, seed, prefill):
    """A balanced random design: every value of every axis equally often, the axes shuffled apart."""
    rng = random.Random(seed)
    columns = [rng.sample((values * count)[:count], count) for values in AXES.values()]
    for i, row in enumerate(zip(*columns, strict=True)):
        options = dict(zip(AXES, row, strict=True))
        top = 70 if options["block"] < 64 else 2 * options["block"] - 20
        lens = [rng.randint(1, top // 2), 0, rng.randint(top // 2, top)]
        query_lens = [rng.randint(1, min(lens[0], 40)), 0, rng.randint(1, 12)] if prefill else None
        if options["starts"]:
            options["starts"] = [rng.randint(0, lens[0]), 0, rng.randint(0, lens[2] // 2)]
        yield pytest.param(i, lens, query_lens, options, id=str(i))


@pytest.mark.parametrize("seed, lens, query_lens, options", [*grid(60, 1, prefill=False)])
def test_decode_equals_the_oracle(seed, lens, query_lens, options):
    Case(seed, lens, query_lens, **options).check(name=("decode", seed))


@pytest.mark.parametrize("seed, lens, query_lens, options", [*grid(60, 2, prefill=True)])
def test_prefill_equals_the_oracle(seed, lens, query_lens, options, monkeypatch):
    if seed % 2:
        monkeypatch.setattr(kernels.reference, "PREFILL_TILE_BYTES", 1)  # the smallest tiles
    Case(seed, lens, query_lens, **options).check(kernels.paged_prefill, name=("prefill", seed))


row = st.tuples(st.integers(0, 40), st.integers(0, 9), st.sampled_from([0, 0, 5, 16, 45]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(row, min_size=1, max_size=4), st.sampled_from([0, 0, 1, 7]), st.sampled_from([1, 3, 8]))
def test_any_lengths_and_tables(rows, window, block):
    lens, starts = [n for n, _, _ in rows], [start for _, _, start in rows]
    options = dict(window=window, block=block, sinks=True, starts=starts, kv_heads=1, group=2)
    Case(len(rows), lens, **options).check()
    query_lens = [min(n, q) for n, q, _ in rows]
    Case(0, lens, query_lens, **options).check(kernels.paged_prefill, max_query_len=9)


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [kernels.paged_decode, kernels.paged_prefill])
def test_float16_and_float64(op):
    half = Case(3, [20, 9], dtype=torch.float16, window=7, sinks=True)
    exact = Case(3, [20, 9], dtype=torch.float64, window=7, sinks=True)
    assert_near(half.run(op, return_lse=False), oracle(half, [(0, 19), (1, 8)])[0], 2**-10)
    with kernels.backend("reference"):  # the others accumulate in float32
        assert_near(exact.run(op, return_lse=False), oracle(exact, [(0, 19), (1, 8)])[0], 1e-13)


def assert_near(got, ref, bound):
    assert (got.double() - ref).abs().max() <= bound


@pytest.mark.parametrize("op", [kernels.paged_decode, kernels.paged_prefill])
def test_rows_that_see_nothing(op):
    case = Case(4, [0, 6, 6], [1, 1, 1], starts=[0, 6, 9])
    out, lse = case.run(op)
    assert not out.any() and (lse == -math.inf).all()
    sinks = torch.randn(6)
    out, lse = case.run(op, sinks=sinks)
    assert not out.any() and torch.equal(lse, sinks.expand(3, 6))
    assert case.run(op, max_seq_len=0, return_lse=False).shape == (3, 6, 8)


def test_decode_is_prefill_of_one_token_in_tiles_too(monkeypatch):
    case = Case(5, [30, 1, 17, 64], window=20, sinks=True, softcap=2.0)
    whole = case.run()
    assert_close(case.run(kernels.paged_prefill)[0], whole[0].double())
    monkeypatch.setattr(kernels.reference, "DECODE_TILE_BYTES", 1)  # a tile is one sequence
    assert_close(case.run()[0], whole[0].double())


@pytest.mark.parametrize("window", [0, 6])
def test_chunked_prefill_equals_one_shot(window):
    case = Case(6, [29], [29], window=window)
    whole, _ = case.run(kernels.paged_prefill)
    for chunk in (1, 4, 10):
        for begin in range(0, 29, chunk):
            end = min(begin + chunk, 29)
            part = kernels.paged_prefill(
                case.query[begin:end], case.key_cache, case.value_cache, case.block_tables,
                ints([0, end - begin]), ints([end]), scale=case.scale, sliding_window=window,
            )  # fmt: skip
            assert_close(part, whole[begin:end].double())


def test_two_halves_merge_by_lse():
    case = Case(7, [37, 20], softcap=3.0)
    whole, whole_lse = case.run()
    (left, left_lse), (right, right_lse) = case.run(seq_lens=[11, 13]), case.run(seq_starts=ints([11, 13]))
    lse = torch.logaddexp(left_lse, right_lse)
    merged = left * (left_lse - lse).exp()[..., None] + right * (right_lse - lse).exp()[..., None]
    assert_close(lse, whole_lse.double())
    assert_close(merged, whole.double())


def test_where_blocks_lie_does_not_matter():
    case = Case(8, [33, 18], spare_blocks=40)
    before, _ = case.run()
    order = torch.randperm(case.key_cache.shape[0])
    case.key_cache, case.value_cache = case.key_cache[order], case.value_cache[order]
    moved = order.argsort()[case.block_tables.clamp(min=0).long()]
    case.block_tables = torch.where(case.block_tables < 0, -1, moved).int()
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # any strides
    assert torch.equal(case.run()[0], before)
    assert_close(case.run(kernels.paged_prefill)[0], before.double())


def test_addresses_beyond_two_to_the_31():
    top = kernels.slot_ids(ints([[2**27, -1]]), 256)
    assert top.dtype == torch.int64 and top[0, 0] == 2**35 and top[0, 255] == 2**35 + 255
    assert (top[0, 256:] == -1).all() and top.shape == (1, 512)
    try:  # 4 GiB of addresses; only what is written takes memory
        key_cache, value_cache = (torch.empty(2**26 + 2, 1, 1, d, dtype=BF16) for d in (32, 1))
    except RuntimeError:
        pytest.skip("this machine does not promise 4 GiB")
    last = 2**26 + 1
    key, value = torch.ones(2, 1, 32, dtype=BF16), torch.tensor([[[3.0]], [[5.0]]], dtype=BF16)
    kernels.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([last, 0]))
    tensors = (torch.ones(1, 1, 32, dtype=BF16), key_cache, value_cache, ints([[last, 0]]))
    assert kernels.paged_decode(*tensors, ints([1]), scale=1.0) == 3
    assert kernels.paged_prefill(*tensors, ints([0, 1]), ints([2]), scale=1.0) == 4
    kernels.copy_blocks(key_cache, value_cache, torch.tensor([[0, last]]))
    assert value_cache[last] == 5


@pytest.mark.parametrize("op", [kernels.paged_decode, kernels.paged_prefill])
def test_autocast_and_autograd_stay_out(op):
    case = Case(9, [40, 12])
    plain, _ = case.run(op)
    case.query.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = case.run(op)
    assert torch.equal(out, plain) and not out.requires_grad and not lse.requires_grad


def test_prefill_keeps_sequences_apart():
    case = Case(10, [12, 12], [5, 5])
    before, _ = case.run(kernels.paged_prefill)
    case.key_cache[case.block_tables[0, 0]] = NAN
    case.value_cache[case.block_tables[0, 1]] = NAN
    after, _ = case.run(kernels.paged_prefill)
    assert after[:5].isnan().all() and torch.equal(after[5:], before[5:])
    padded = torch.cat([case.query, case.query])  # rows of no sequence, as in a buffer kept at one size
    bounds = ints([0, 5, 10])
    out = kernels.paged_prefill(
        padded, case.key_cache, case.value_cache, case.block_tables, bounds, ints([12, 12]), scale=case.scale
    )
    assert torch.equal(out[5:10], before[5:]) and not out[10:].any()
