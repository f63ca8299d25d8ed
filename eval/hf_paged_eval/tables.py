"""Tables of figures on the terminal, as every command of the evaluation prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def figures_table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable], text: Collection[int] = (0,), wrap: bool = False
) -> Table:
    """A table without lines between its rows, figures to the right.

    Args:
        text: the columns that hold words, to the left.
        wrap: whether those may be broken.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        is_text = index in text
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not (wrap and is_text))
    for row in rows:
        table.add_row(*map(str, row))
    return table
