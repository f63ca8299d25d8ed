"""Every backend where numbers, sizes and addresses are extreme (CASES B16, B34, B35)."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from kernel_cases import build, check, expected, limits, moved, within
from kernel_grid import is_slow, targets

import hf_paged_kernels as kernels

NAN = float("nan")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = pytest.mark.parametrize("backend, device", targets())
CALLS = pytest.mark.parametrize("chunks", [None, [0, 1, 9]], ids=["decode", "prefill"])
LENS = [0, 30, 41]


@TARGETS
@CALLS
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_scores_in_the_thousands(backend, device, chunks, dtype):
    # Without the running maximum exp overflows, or every weight underflows. A score of thousands has errors of
    # 1e-3 or so in float32, hence weights too: what is wanted is the order of magnitude.
    case = build(LENS, chunks, dtype=dtype, head_dim=24, sinks=True, seed=1, device=device)
    for sinks in (None, case.options["sinks"], case.options["sinks"] * 2000):
        hot = replace(case, query=case.query * 1000, options=case.options | {"sinks": sinks})
        ref, ref_lse = expected(hot)
        out, lse = hot.run(backend)
        within(out, ref, limits(hot, backend, ref) + 0.02, "out")
        within(lse, ref_lse, 1e-5 * ref_lse.abs().clamp(min=1), "lse")


@TARGETS
@CALLS
def test_sums_beyond_what_float16_holds(backend, device, chunks):
    case = build(LENS, chunks, dtype=F16, head_dim=128, head_dim_v=16, seed=2, device=device)
    case.query[case.query.isfinite()] = 300.0
    case.key_cache[case.key_cache.isfinite()] = 300.0  # 128 * 300 * 300 is past 65504
    case.value_cache[case.value_cache.isfinite()] = 60000.0
    case.options["scale"] = 1e-7
    check(case, backend)


@TARGETS
@CALLS
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_caches_that_start_anywhere_in_memory(backend, device, chunks, dtype):
    def housed(cache):  # a layer's part of a larger allocation, aligned to nothing; NaN around it
        room = torch.full((cache.numel() + 14,), NAN, dtype=cache.dtype, device=cache.device)
        return room[7:-7].view(cache.shape).copy_(cache)

    case = build(LENS, chunks, dtype=dtype, head_dim=64, seed=3, device=device)
    query = housed(case.query.contiguous())
    check(replace(case, query=query, key_cache=housed(case.key_cache), value_cache=housed(case.value_cache)), backend)


@functools.cache
def many_sequences(count, device):
    """A decode and a prefill, each with what is expected: of so many sequences that takes longer than a backend."""
    cases = (
        build([1 + s % 5 for s in range(count)], kv_heads=1, group=1, window=3, device=device),
        build([s % 5 for s in range(count)], [s % 3 if s % 5 > 1 else 0 for s in range(count)], device=device),
    )
    return [(case, expected(case)) for case in cases]


@TARGETS
def test_many_sequences(backend, device):
    for case, wanted in many_sequences(40 if is_slow(backend, device) else 3000, device):
        check(case, backend, wanted)


@TARGETS
@pytest.mark.parametrize("sinks", [False, True])
def test_a_long_sequence_beside_short_ones(backend, device, sinks):
    # Backends split a long sequence among workers; the parts must join to the same softmax, sinks counted once.
    longest = 600 if is_slow(backend, device) else 33_000
    case = build([longest, 1, 0, 17], head_dim=16, kv_heads=1, block_size=16, sinks=sinks, softcap=2.0, device=device)
    check(case, backend)
    half = torch.tensor([longest // 2, 0, 0, 0], dtype=torch.int32, device=device)
    check(replace(case, options=case.options | {"seq_starts": half}), backend)
    check(replace(case, options=case.options | {"sliding_window": longest // 3}), backend)


@TARGETS
@CALLS
def test_block_ids_beyond_16_bits(backend, device, chunks):
    case = build(LENS, chunks, block_size=1, seed=4, device=device)
    shift = 70_000

    def deep(cache):
        return torch.cat([torch.full((shift, *cache.shape[1:]), NAN, device=device), cache])

    table, *rest = case.index
    table = torch.where(table < 0, -1, table + shift)
    deeper = replace(case, key_cache=deep(case.key_cache), value_cache=deep(case.value_cache), index=(table, *rest))
    check(deeper, backend, expected(case))


def pool_of_more_than_two_to_the_31(device):
    """Caches of 2**31 elements and a few blocks each; on a CPU only pages that are written take memory."""
    sizes = (2**25 + 4, 1, 4, 16)
    try:
        if torch.device(device).type == "cuda" and torch.cuda.mem_get_info()[0] < 2**33 + 2**32:
            pytest.skip("needs 12 GB of GPU memory")
        return torch.empty(sizes, dtype=BF16, device=device), torch.empty(sizes, dtype=BF16, device=device)
    except RuntimeError as error:
        pytest.skip(f"this machine does not promise 8 GiB of addresses: {error}")


@TARGETS
def test_a_pool_of_more_than_two_to_the_31_elements(backend, device):
    # The same tokens in the last blocks of a huge pool and in blocks 0 to 3 of a small one.
    huge = pool_of_more_than_two_to_the_31(device)
    small = tuple(torch.full((8, *cache.shape[1:]), NAN, dtype=BF16, device=device) for cache in huge)
    assert huge[0].numel() > 2**31
    shift = huge[0].shape[0] - 4
    generator = torch.Generator().manual_seed(5)
    key, value, query = (torch.randn(n, h, 16, generator=generator).to(BF16) for n, h in ((13, 1), (13, 1), (4, 2)))
    key, value, query = (moved(tensor, device) for tensor in (key, value, query))
    slots = torch.arange(13)
    options = dict(scale=0.3, return_lse=True)
    results = []
    with kernels.backend(backend):
        for caches, first in ((huge, shift), (small, 0)):
            kernels.reshape_and_cache(key, value, *caches, (slots + 4 * first).to(device))
            pair = torch.tensor([[first, first + 3]], device=device)
            kernels.copy_blocks(*caches, pair)  # block 3 held the last token alone; now it is a copy of block 0
            table = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32, device=device) + first
            seq_lens = torch.tensor([15], dtype=torch.int32, device=device)
            bounds = torch.tensor([0, 4], dtype=torch.int32, device=device)
            results += kernels.paged_decode(query[:1], *caches, table, seq_lens, **options)
            results += kernels.paged_prefill(query, *caches, table, bounds, seq_lens, **options)
    for far, near in zip(results[:4], results[4:], strict=True):
        assert torch.equal(far, near) and not near.isnan().any()
    whole = torch.cat([value[:12], value[:3]]).double()[:, 0]
    keys = torch.cat([key[:12], key[:3]]).double()[:, 0]
    dense = torch.softmax(0.3 * query[0].double() @ keys.mT, -1) @ whole
    assert (results[4][0].double() - dense).abs().max() <= 2**-7 * dense.abs().max()
    assert math.isfinite(results[5].sum())
