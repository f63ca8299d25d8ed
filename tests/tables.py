"""Tables of the docs that a test run makes: what was tried, and how it went.

Contract: tests record one row each; `check` compares what was recorded with the table in the docs and fails if they
differ. `pytest --update-tables` writes it instead. A run that tried only a part of the rows has nothing to compare.
"""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- table made by the test run: make tables -->", "<!-- end of table -->"


class Table:
    """One table of one page.

    Args:
        page: file in docs/ that holds the table between its two markers.
        columns: headings, the first that of the row's name.
        rows: names of all rows, in their order.
    """

    def __init__(self, page: str, columns: list[str], rows: list[str]) -> None:
        self.page, self.columns, self.rows = DOCS / page, columns, rows
        self.recorded: dict[str, list[str]] = {}

    def record(self, row: str, *cells: str) -> None:
        assert row in self.rows and len(cells) == len(self.columns) - 1
        self.recorded[row] = list(cells)

    def text(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[row, *self.recorded[row]] for row in self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    def check(self, update: bool) -> None:
        missing = [row for row in self.rows if row not in self.recorded]
        if missing:
            pytest.skip(f"only a part of the table was run; {missing[0]!r} is missing")
        page = self.page.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        old, after = rest.split(END)
        if update:
            self.page.write_text(f"{before}{BEGIN}\n\n{self.text()}\n\n{END}{after}", encoding="utf-8")
        else:
            assert old.strip() == self.text(), (
                f"{self.page.name} is not current: run `make tables` and look at the change"
            )
