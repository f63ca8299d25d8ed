"""The fingerprint of contents: any single write shows, and neither threads, devices nor layouts matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build
from weights_helpers import in_place, q_proj, step, watched

import hf_paged.fingerprint as fingerprint_module
from hf_paged.fingerprint import COLUMNS, fingerprint

SHAPES = [(1,), (3,), (7, 5), (64, 64), (COLUMNS, 8), (2 * COLUMNS + 3, 9)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_single_write_is_noticed(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float16]))
    tensors = [torch.zeros(shape).normal_(generator=torch.Generator().manual_seed(1)).to(dtype) for shape in SHAPES]
    before = fingerprint(tensors)
    which = data.draw(st.sampled_from(range(len(tensors))))
    raw = tensors[which].view(-1).view(torch.uint8).numpy()
    place = data.draw(st.integers(0, raw.size - 1))
    old = raw[place].item()
    raw[place] = data.draw(st.integers(0, 255).filter(lambda new: new != old))
    assert fingerprint(tensors) != before
    raw[place] = old
    assert fingerprint(tensors) == before


@pytest.mark.parametrize("count", [2, 4, 64, 576])
@pytest.mark.parametrize("axis", [0, 1])
def test_signs_of_some_rows_or_columns(axis, count):
    weight = torch.randn(1152, 576)
    before = fingerprint([weight])
    for start in (0, 1):
        flipped = weight.clone()
        flipped.narrow(axis, start, count if count < weight.shape[axis] else count - 1).neg_()
        assert fingerprint([flipped]) != before


def test_order_shapes_and_layouts():
    one, two = torch.randn(8, 8), torch.randn(8, 8)
    assert fingerprint([one, two]) != fingerprint([two, one])
    flat = torch.randn(1000)
    odd = flat[1:901].view(30, 30)  # lies at an odd address of its storage
    assert fingerprint([odd]) == fingerprint([odd.clone()])
    wide = torch.randn(30, 60)[:, ::2]
    assert fingerprint([wide]) == fingerprint([wide.contiguous()])
    turned = torch.randn(6, 8).t()
    assert fingerprint([turned]) == fingerprint([turned.t()])
    for tensor in (
        one.to_sparse(),
        one.to(torch.complex64).conj(),
        torch.quantize_per_tensor(one, 0.1, 0, torch.qint8),
    ):
        assert fingerprint([tensor]) == fingerprint([tensor.clone()])
    assert fingerprint([torch.empty(0), torch.empty(3, device="meta"), torch.tensor(1.5)])
    nan = torch.full((4,), float("nan"))
    assert fingerprint([nan]) == fingerprint([nan.clone()])


def test_threads_do_not_matter(monkeypatch):
    tensors = [torch.randn(70001), torch.randn(3, 5), *(torch.randn(64, 300) for _ in range(40))]
    monkeypatch.setattr("hf_paged.fingerprint._THREADED_FROM", 1)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(fingerprint(tensors))
    assert found[0] == found[1] == found[2]


def test_accelerators_sum_the_same():
    matrix, weights = torch.randn(70, 2 * COLUMNS).view(torch.int64), torch.randn(140).view(torch.int64)
    sums = [torch.ones(COLUMNS, dtype=torch.int64) for _ in range(2)]
    fingerprint_module._add_product(sums[0], matrix, weights, -7)
    fingerprint_module._add_product_elsewhere(sums[1], matrix, weights, -7)
    exact = [
        1 - 7 * sum(w * x for w, x in zip(weights.tolist(), column, strict=True)) for column in matrix.t().tolist()
    ]
    assert [value % 2**64 for value in sums[0].tolist()] == [value % 2**64 for value in exact]
    assert torch.equal(*sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    model = build("llama_gqa").cuda()
    on_cpu = fingerprint(parameter.cpu() for parameter in model.parameters())
    assert fingerprint(model.parameters()) == {"cuda:0": on_cpu["cpu"]}
    watch = watched(model)
    q_proj(model).weight.data[7, 9] += 1e-3
    assert not watch.check() and watch.check_fingerprint() and not watch.check_fingerprint()
    in_place(model)
    assert watch.check()
    step(torch.optim.AdamW, fused=True)(model)
    assert watch.check()
    model.cpu()
    assert watch.check()
