"""Attention over blocks that sequences share, computed once for them: the same as for each by itself."""

import pytest
import torch
from kernel_grid import targets

import hf_paged_kernels as kernels

TARGETS = pytest.mark.parametrize("backend, device", targets())
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def problem(device, dtype, kv_heads=2, group=3, block_size=4, num_shared=3, sharing=(0, 1, 3, 4), seed=0):
    """Five sequences over one pool, of which some begin with the same blocks."""
    generator = torch.Generator().manual_seed(seed)
    pools = [torch.randn(60, kv_heads, block_size, 24, generator=generator).to(dtype) for _ in range(2)]
    query = torch.randn(5, kv_heads * group, 24, generator=generator).to(dtype)
    table = torch.randperm(60, generator=generator)[:50].view(5, 10).int()
    for row in sharing:
        table[row, :num_shared] = table[sharing[0], :num_shared]
    lens = torch.tensor([13, 40, 1, 14, 25], dtype=torch.int32)
    starts = torch.zeros(5, dtype=torch.int32)
    starts[list(sharing)] = num_shared * block_size
    rows = None if len(sharing) == 5 else torch.tensor(sharing)
    return (
        [tensor.to(device) for tensor in (query, *pools, table, lens)],
        rows if rows is None else rows.to(device),
        starts.to(device),
    )


@TARGETS
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("softcap, sinks", [(0.0, False), (2.0, True)])
def test_equals_each_sequence_by_itself(backend, device, dtype, softcap, sinks):
    tensors, rows, starts = problem(device, dtype)
    sinks = torch.linspace(-2, 4, 6, device=device) if sinks else None
    options = dict(scale=0.3, softcap=softcap, sinks=sinks)
    with kernels.backend("reference"):
        floats = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
        want = kernels.paged_decode(*floats, **options | {"sinks": None if sinks is None else sinks.double()})
    with kernels.backend(backend):
        got = kernels.paged_decode_shared(*tensors, rows, 3, starts, **options)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


@TARGETS
def test_all_sequences_share(backend, device):
    tensors, rows, starts = problem(device, torch.float32, sharing=(0, 1, 2, 3, 4), num_shared=2)
    tensors[4][2] = 9
    assert rows is None
    with kernels.backend(backend):
        got = kernels.paged_decode_shared(*tensors, rows, 2, starts, scale=0.3, max_seq_len=40)
        torch.testing.assert_close(got, kernels.paged_decode(*tensors, scale=0.3), rtol=1e-5, atol=1e-6)


def test_states_merge_where_one_or_both_are_empty():
    out, other = torch.randn(2, 4, 3, 8)
    lse, other_lse = torch.randn(2, 4, 3)
    lse[0], other_lse[1], lse[2], other_lse[2] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    out[lse.isinf()], other[other_lse.isinf()] = 0, 0  # as the operators give them
    merged, total = kernels.merge_states(out, lse, other, other_lse)
    torch.testing.assert_close(merged[0], other[0])
    torch.testing.assert_close(merged[1], out[1])
    assert not merged[2].any() and (total[2] == -torch.inf).all()
    weight = torch.sigmoid(lse[3] - other_lse[3])[:, None]
    torch.testing.assert_close(merged[3], weight * out[3] + (1 - weight) * other[3])
