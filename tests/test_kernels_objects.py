"""Snapshots of tensors and dicts: what they see, and that they keep and break nothing."""

import gc
import sys
from collections import OrderedDict

import pytest
import torch

from hf_paged_kernels import ObjectSnapshot

pytestmark = pytest.mark.skipif(
    not ObjectSnapshot.available(), reason="needs the C extension, and a Python that it can look into"
)


def tensors(count=5):
    return [torch.randn(3, 2) for _ in range(count)]


def test_nothing_changed():
    some = tensors()
    dicts = [{"a": some[0], "b": None}, {}, {some[1]: "c"}]
    snapshot = ObjectSnapshot(some, some[:3], dicts)
    counts = [sys.getrefcount(one) for one in (*some, *dicts)]
    assert all(snapshot.holds() for _ in range(100))
    some[0].sum(), len(dicts[0]), some[2].requires_grad_()
    assert snapshot.holds() and counts == [sys.getrefcount(one) for one in (*some, *dicts)]


def test_nothing_to_look_at():
    assert ObjectSnapshot([], [], []).holds() and ObjectSnapshot([], [], [{}]).holds()


@pytest.mark.parametrize("at", [0, 4])
def test_versions(at):
    some = tensors()
    snapshot = ObjectSnapshot(some, [], [])
    some[at].add_(1)
    assert not snapshot.holds()


@pytest.mark.parametrize("at", [0, 4])
def test_addresses(at):
    some = tensors()
    snapshot = ObjectSnapshot([], some, [])
    some[at].add_(1)
    assert snapshot.holds()
    some[at].data = torch.zeros(3, 2)
    assert not snapshot.holds()


def test_two_tensors_that_swap_their_memory():
    some = tensors()
    snapshot = ObjectSnapshot(some, some, [])
    some[0].data, some[1].data = some[1].data, some[0].data
    assert not snapshot.holds()


CHANGES = {
    "added": lambda one: one.update(c=3),
    "taken out": lambda one: one.pop("a"),
    "last taken out": lambda one: one.pop("b"),
    "replaced": lambda one: one.update(a=2.5),
    "another key": lambda one: (one.pop("b"), one.update(d="x")),
    "emptied": dict.clear,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_dicts(change, at):
    dicts = [{"a": object(), "b": "x"} for _ in range(3)]
    snapshot = ObjectSnapshot([], [], dicts)
    assert snapshot.holds()
    CHANGES[change](dicts[at])
    assert not snapshot.holds()


def test_dicts_that_tell_of_another_order_than_they_keep():
    """torch keeps hooks in such ones, and puts some of them to the front."""
    hooks = OrderedDict(a=1, b=2)
    hooks.move_to_end("b", last=False)
    snapshot = ObjectSnapshot([], [], [hooks])
    assert list(hooks) == ["b", "a"] and snapshot.holds()
    hooks["c"] = 3
    assert not snapshot.holds()


def test_a_tensor_whose_address_is_no_number():
    one = torch.zeros(2).as_subclass(Odd)
    snapshot = ObjectSnapshot([], [one, *tensors(3)], [])
    assert snapshot.holds()
    Odd.address = "nowhere"
    try:
        with pytest.raises(TypeError):
            snapshot.holds()
    finally:
        Odd.address = None


class Odd(torch.Tensor):
    address = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs)
        return cls.address or found


def test_an_empty_dict_that_is_filled_before_one_that_lost_as_much():
    """Entries are counted for each dict, not for all."""
    value = object()
    dicts = [{}, {"a": value}]
    snapshot = ObjectSnapshot([], [], dicts)
    dicts[0]["a"] = dicts[1].pop("a")
    assert not snapshot.holds()


def test_equal_objects_are_other_objects():
    one = {"a": 10**20}
    snapshot = ObjectSnapshot([], [], [one])
    one["a"] = int("1" + "0" * 20)
    assert not snapshot.holds()


class Refuses(torch.Tensor):
    refuse = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.refuse:
            raise LookupError("not now")
        return super().__torch_function__(function, types, args, kwargs)


def test_what_python_raises_comes_out(monkeypatch):
    one = torch.zeros(2).as_subclass(Refuses)
    for snapshot in (ObjectSnapshot([one], [], []), ObjectSnapshot([], [one], [])):
        assert snapshot.holds()
        with monkeypatch.context() as patch, pytest.raises(LookupError, match="not now"):
            patch.setattr(Refuses, "refuse", True)
            snapshot.holds()
        assert snapshot.holds()


def test_it_keeps_alive_what_it_names():
    snapshot = ObjectSnapshot(tensors(50), tensors(50), [{"a": torch.zeros(1), "b": object()} for _ in range(50)])
    gc.collect()
    assert all(snapshot.holds() for _ in range(3))
