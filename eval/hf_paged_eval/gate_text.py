"""The text of a gate: a corpus, and what of it a stored baseline depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .corpus import load_corpus
from .gate_run import Text

CALIBRATION_TOKENS = 4096


def text_of(tokenizer: Any, **options) -> Text:
    """A corpus as a gate takes it.

    Args:
        options: of `corpus.load_corpus`.
    Raises:
        ValueError: as it raises them.
    """
    corpus = load_corpus(tokenizer, **_given(options))
    settings = {
        "documents": corpus.documents_are,
        "bos_policy": corpus.bos_policy,
        "max_tokens": options.get("max_tokens"),
    }
    about = {"described": corpus.describe(), "licence": corpus.licence}
    return Text(corpus.documents, corpus.name, corpus.hash, corpus.num_bytes, about, settings, corpus.window_bos)


def calibration_documents(tokenizer: Any, where: Mapping, how: Mapping) -> list[list[int]]:
    """Documents of the same source behind those that are scored; of a short source, the scored ones themselves."""
    scored = load_corpus(tokenizer, **_given({**where, **how})).documents
    enough = sum(map(len, scored)) + CALIBRATION_TOKENS
    longer = load_corpus(tokenizer, **_given({**where, **how, "max_tokens": enough})).documents
    skip, rest = sum(map(len, scored)), []
    for document in longer:
        tail = document[skip:]
        skip = max(0, skip - len(document))
        if len(tail) > 1:
            rest.append(list(tail))
    return rest or [list(document) for document in scored]


def _given(options: Mapping) -> dict:
    return {name: value for name, value in options.items() if value is not None}
