"""Rolling windows: every token scored once, with the context that it should have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_eval import Window, rolling_windows


@given(
    length=st.integers(0, 60),
    max_length=st.none() | st.integers(2, 20),
    data=st.data(),
    before=st.integers(0, 1),
)
def test_every_token_is_scored_once(length, max_length, data, before):
    stride = None if max_length is None else data.draw(st.none() | st.integers(1, max_length - before))
    windows = rolling_windows(length, max_length, stride, before)
    scored = [index for window in windows for index in range(window.first_scored, window.end)]
    assert scored == list(range(1 - before, length))  # each once, in order, and the first only with BOS
    for window in windows:
        assert window.first_scored - window.start + before >= 1  # something to be predicted from
        fed = window.end - 1 - window.start + before  # the last token is never fed
        assert max_length is None or fed <= max_length
        if max_length is not None and stride is not None and stride < max_length - before:
            assert window.end - window.start + before <= max_length


@given(length=st.integers(2, 80), max_length=st.integers(2, 20), data=st.data())
def test_windows_are_those_of_the_guide(length, max_length, data):
    """transformers' guide: begin moves by the stride, targets are what was not scored before."""
    stride = data.draw(st.integers(1, max_length - 1))
    want, done = [], 1
    for begin in range(0, length, stride):
        end = min(begin + max_length, length)
        if end > done:
            want.append(Window(begin, end, done))
            done = end
        if end == length:
            break
    assert rolling_windows(length, max_length, stride) == want


def test_examples():
    assert rolling_windows(10) == [Window(0, 10, 1)]
    assert rolling_windows(10, num_before=1) == [Window(0, 10, 0)]
    assert rolling_windows(10, 4, 2) == [Window(0, 4, 1), Window(2, 6, 4), Window(4, 8, 6), Window(6, 10, 8)]
    # Windows that do not overlap lend each other one token; the last one is short.
    assert rolling_windows(10, 4) == [Window(0, 4, 1), Window(3, 8, 4), Window(7, 10, 8)]
    assert rolling_windows(10, 5, num_before=1) == [Window(0, 4, 0), Window(4, 8, 4), Window(8, 10, 8)]
    assert rolling_windows(5, 4, 3) == [Window(0, 4, 1), Window(3, 5, 4)]
    assert rolling_windows(0) == rolling_windows(1) == rolling_windows(0, num_before=1) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((10, 1), "max_length must be at least 2"),
        ((10, 8, 9), "stride must be from 1 to max_length=8"),
        ((10, 8, 8, 1), "less the 1 before each window"),
        ((10, 8, 0), "stride must be from 1"),
        ((10, None, 4), "needs max_length"),
        ((10, 8.0), "max_length must be an integer"),
        ((10, 8, True), "stride must be an integer"),
    ],
)
def test_wrong_windows_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        rolling_windows(*arguments)
