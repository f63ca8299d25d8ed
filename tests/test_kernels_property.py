"""Every backend on problems that hypothesis makes up: attention against float64, writes against plain loops.

Random block tables, lengths and chunks, features, head and block sizes on no list, strides of every argument; NaN or
inf in each slot that must not be read (kernel_cases.py). A failure prints the problem that repeats it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import build, check, moved, strided
from kernel_grid import is_slow, targets

import hf_paged_kernels as kernels

TARGETS = pytest.mark.parametrize("backend, device", targets())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32}


@st.composite
def problems(draw, longest: int, widest: int):
    """Arguments of kernel_cases.build."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 17, 31]))
    length = st.integers(0, 3 * block_size) | st.integers(1, longest)
    lens = draw(st.lists(length, max_size=4))
    windows = st.integers(1, 2 * block_size + 1) | st.integers(1, longest)
    return dict(
        lens=lens,
        chunks=draw(st.none() | st.tuples(*(st.integers(0, min(n, widest)) for n in lens)).map(list)),
        head_dim=draw(st.integers(8, 40) | st.sampled_from([8, 16, 64, 120, 128, 200])),
        head_dim_v=draw(st.none() | st.integers(8, 40)),
        block_size=block_size,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.just(0) | windows),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sinks=draw(st.booleans()),
        starts=draw(st.none() | st.tuples(*(st.integers(0, n + 2) for n in lens)).map(list)),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@TARGETS
def test_attention_of_any_problem(backend, device):
    slow = is_slow(backend, device)
    # What is expected comes from the reference in float64, so that fewer problems tell enough of itself.
    many = 200 if backend == "reference" else 400

    @settings(max_examples=30 if slow else many)
    @given(problems(longest=60 if slow else 700, widest=20 if slow else 200))
    def holds(problem):
        check(build(**problem, device=device), backend)

    holds()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Comparable even where NaN."""
    return tensor.cpu().view(BITS[tensor.itemsize])


@TARGETS
def test_writes_put_every_byte_where_a_loop_puts_it(backend, device):
    @settings(max_examples=10 if is_slow(backend, device) else 100)
    @given(
        st.lists(st.integers(-6, 23), max_size=14, unique=True),
        st.sampled_from([(1, 24), (4, 6), (12, 2), (3, 8)]),
        st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40)),
        st.sampled_from(DTYPES),
        st.randoms(use_true_random=False),
    )
    def holds(slots, shape, sizes, dtype, rng):
        block_size, num_blocks = shape
        slots = [max(slot, -1) for slot in slots]  # several -1
        kv_heads, *head_dims = sizes
        rows, caches, wanted = [], [], []
        for head_dim in head_dims:
            row = torch.tensor([[[rng.gauss(0, 1)] for _ in range(kv_heads)] for _ in slots]).view(-1, kv_heads, 1)
            row = (row + torch.arange(head_dim)).to(dtype)
            cache = torch.full((num_blocks, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
            wanted.append(cache.clone())
            for token, slot in enumerate(slots):
                for head in range(kv_heads if slot >= 0 else 0):
                    wanted[-1][slot // block_size, head, slot % block_size] = row[token, head]
            rows.append(moved(strided(row, rng), device))
            caches.append(cache.to(device))
        mapping = moved(strided(torch.tensor(slots, dtype=torch.int64), rng), device)
        with kernels.backend(backend):
            kernels.reshape_and_cache(*rows, *caches, mapping)
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(bits(cache), bits(want))

    holds()


@TARGETS
def test_copies_read_every_source_before_they_write(backend, device):
    pair = st.tuples(st.integers(0, 6), st.integers(0, 6))

    @settings(max_examples=10 if is_slow(backend, device) else 100)
    @given(
        st.lists(pair, max_size=7, unique_by=lambda pair: pair[1]),
        st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 70), st.integers(1, 40)),
        st.sampled_from(DTYPES),
        st.randoms(use_true_random=False),
    )
    def holds(pairs, sizes, dtype, rng):
        kv_heads, block_size, *head_dims = sizes
        count = 7 * kv_heads * block_size
        caches = [torch.arange(count * d).view(7, kv_heads, block_size, d) % 251 for d in head_dims]
        caches = [cache.to(dtype).to(device) for cache in caches]
        before = [cache.clone() for cache in caches]
        wanted = [cache.clone() for cache in caches]
        for source, destination in pairs:
            for want, old in zip(wanted, before, strict=True):
                want[destination] = old[source]
        tensor = moved(strided(torch.tensor(pairs, dtype=torch.int64).view(-1, 2), rng), device)
        with kernels.backend(backend):
            kernels.copy_blocks(*caches, tensor)
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(bits(cache), bits(want))

    holds()
