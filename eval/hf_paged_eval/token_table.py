"""What is known of every scored token, as columns.

Contract: a `TokenTable` has one entry a scored token, in the order of the documents and of the tokens in them. The
columns that compare with a reference are None where there is none. No torch in this file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenTable:
    """Columns of one length.

    Attributes:
        document: which document, `[tokens]` int32.
        index: position in the document, int64.
        position: tokens of context before it in its window, int32.
        logprob: its log-probability in nats, float64.
        best: whether it is the model's most likely token, bool.
        reference_logprob: the same token's under the reference, float64, or None.
        kl: KL(reference || candidate) of the distributions that it was drawn from, in nats, float64, or None.
        agrees: whether both have the same most likely token, bool, or None.
    """

    document: np.ndarray
    index: np.ndarray
    position: np.ndarray
    logprob: np.ndarray
    best: np.ndarray | None = None
    reference_logprob: np.ndarray | None = None
    kl: np.ndarray | None = None
    agrees: np.ndarray | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            if column is not None and len(column) != len(self.document):
                raise ValueError(f"column {field.name} has {len(column)} entries, document has {len(self.document)}")

    def __len__(self) -> int:
        return len(self.document)

    @property
    def has_reference(self) -> bool:
        return self.reference_logprob is not None

    def select(self, chosen: np.ndarray) -> TokenTable:
        """The entries that a mask or an index array chooses."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return TokenTable(**{name: None if column is None else column[chosen] for name, column in columns.items()})

    def by_document(self, count: int) -> list[np.ndarray]:
        """The log-probabilities of each of `count` documents."""
        ends = np.searchsorted(self.document, np.arange(count), side="right")
        return np.split(self.logprob, ends[:-1]) if count else []

    @classmethod
    def empty(cls, size: int, has_reference: bool) -> TokenTable:
        """Columns to be filled in."""

        def column(dtype) -> np.ndarray:
            return np.zeros(size, dtype=dtype)

        compared = (column(np.float64), column(np.float64), column(bool)) if has_reference else (None, None, None)
        return cls(column(np.int32), column(np.int64), column(np.int32), column(np.float64), column(bool), *compared)
