"""How a document is cut into windows, so that each of its tokens is scored once.

Contract: the windows of `rolling_windows` cover a document in order. A window's last tokens are scored, those before
them are context only; every token but the very first is scored by exactly one window, and the first one too where
something (a BOS token) stands before every window. No torch in this file.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """A piece of a document.

    Attributes:
        start, end: the window is tokens start to end - 1 of the document.
        first_scored: tokens first_scored to end - 1 are scored in this window.
    """

    start: int
    end: int
    first_scored: int


def check_window(max_length: int | None, stride: int | None, num_before: int = 0) -> None:
    """Raise ValueError unless these give every token its window.

    Args:
        max_length: tokens of a window, `num_before` of them included; None for one window a document.
        stride: new tokens of each window after the first; None for as many as a window has room for.
        num_before: tokens that stand before every window.
    """
    if max_length is None:
        if stride is not None:
            raise ValueError(f"stride={stride} needs max_length: without it each document is one window")
        return
    for name, value in (("max_length", max_length), ("stride", stride)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be an integer or None, got {value!r}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, a token and its context, got {max_length}")
    if stride is not None and not 1 <= stride <= max_length - num_before:
        bound = f"max_length={max_length}" + (f" less the {num_before} before each window" if num_before else "")
        raise ValueError(f"stride must be from 1 to {bound}, got {stride}")


def rolling_windows(
    length: int, max_length: int | None = None, stride: int | None = None, num_before: int = 0
) -> list[Window]:
    """The windows of a document.

    Window k begins at token k * stride and has `max_length` tokens, or what is left. So each window after the first has
    `max_length - stride` tokens of context, and the last one may be short. With a stride of `max_length`, where windows
    do not overlap, a window's first token would have no context: the token before it is given as context (and the
    window's own last token is never fed to the model, which so sees `max_length` tokens all the same).

    Args:
        length: tokens of the document.
        max_length, stride, num_before: as `check_window` takes them.
    Returns:
        Only windows that score something: none for an empty document, nor for one token with nothing before it.
    Raises:
        ValueError: `max_length` or `stride` is out of its bounds.
    """
    check_window(max_length, stride, num_before)
    first = 0 if num_before else 1
    if length <= first:
        return []
    if max_length is None:
        return [Window(0, length, first)]
    size = max_length - num_before
    stride = size if stride is None else stride
    windows, scored, begin = [], first, 0
    while scored < length:
        end = min(begin + size, length)
        if end > scored:
            start = begin if begin < scored or num_before else scored - 1
            windows.append(Window(start, end, scored))
            scored = end
        begin += stride
    return windows
