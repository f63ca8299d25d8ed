"""Where texts come from: Python itself, `datasets`, local files.

Contract: each gives texts one by one, and raises ValueError (with the row) where there is none. No torch in this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path


def embedded_texts() -> list[str]:
    """The embedded corpus: the data model of Python as one long text, then the other topics by name."""
    from pydoc_data.topics import topics

    # Together some 100,000 characters on one subject: over 8,000 tokens in any tokenizer of words or less.
    related = [name for name in ("objects", "types", "specialnames") if name in topics]
    others = [name for name in sorted(topics) if name not in related]
    return ["\n\n".join(topics[name].strip() for name in related)] + [topics[name].strip() for name in others]


def from_datasets(dataset: str, subset: str | None, split: str, column: str) -> Iterator[str]:
    from datasets import load_dataset

    return _column(load_dataset(dataset, subset, split=split), column, dataset)


def from_file(path: Path, column: str) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    kind = path.suffix.lower().removeprefix(".")
    if kind == "txt":
        return iter([path.read_text(encoding="utf-8")])
    if kind == "parquet":
        import pyarrow.parquet

        return _column(pyarrow.parquet.read_table(path).to_pylist(), column, path)
    if kind == "jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return _column([json.loads(line) for line in lines if line.strip()], column, path)
    if kind == "json":
        text = path.read_text(encoding="utf-8")
        try:
            rows = json.loads(text)
        except json.JSONDecodeError:  # one object a line, as datasets also takes it
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        if isinstance(rows, dict):
            rows = rows[column] if isinstance(rows.get(column), list) else [rows]
        return _column(rows, column, path)
    raise ValueError(f"path must end in .txt, .json, .jsonl or .parquet, got {path.name!r}")


def _column(rows: Iterable, column: str, source) -> Iterator[str]:
    for number, row in enumerate(rows):
        text = row if isinstance(row, str) else row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            known = f"it has {', '.join(map(str, row))}" if isinstance(row, dict) else f"it is {type(row).__name__}"
            raise ValueError(f"{source}: row {number} has no text in column {column!r}; {known}")
        yield text
