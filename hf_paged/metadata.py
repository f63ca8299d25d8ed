"""AttentionMetadata: what the attention of one forward needs to know of the block tables.

Contract: one object a forward and group of layers, built once and shared by the group's layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class AttentionMetadata:
    """Where the tokens of one forward lie. Columns are positions in the padded batch; a row's own
    positions start at 0 with its first kept column.

    Attributes:
        first_column, num_columns: the columns that this forward adds, `num_columns` tokens a row.
        row_starts: `[num_seqs]` int64, columns that each row does not keep (left padding).
        block_tables: `[num_seqs, max_blocks]` int32; -1 where a block was given back.
        slot_mapping: `[num_seqs * num_columns]` int64, row by row; -1 where nothing is written.
        seq_lens: `[num_seqs]` int32, kept tokens of each row with this forward's.
        max_seq_len: largest of `seq_lens`.
        shared_rows: rows come in runs of this many identical ones, written once.
    """

    first_column: int
    num_columns: int
    row_starts: np.ndarray
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    shared_rows: int = 1
    _queries: tuple | None = field(default=None, repr=False)

    @property
    def last_column(self) -> int:
        return self.first_column + self.num_columns

    def packed_queries(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """How the queries `[num_seqs * num_columns]` of this forward pack.

        Returns:
            query_start_loc `[num_seqs + 1]` int32; the indices of the queries that are no padding (None where
            all are real); the largest number of queries of a row.
        """
        if self._queries is None:
            padding = np.clip(self.row_starts - self.first_column, 0, self.num_columns)
            counts = self.num_columns - padding
            starts = np.zeros(len(counts) + 1, dtype=np.int32)
            np.cumsum(counts, out=starts[1:])
            index = None
            if padding.any():
                real = np.arange(self.num_columns)[None] >= padding[:, None]
                index = torch.from_numpy(np.flatnonzero(real)).to(self.seq_lens.device)
            query_start_loc = torch.from_numpy(starts).to(self.seq_lens.device)
            self._queries = (query_start_loc, index, int(counts.max(initial=0)))
        return self._queries
