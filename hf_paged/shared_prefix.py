"""Decoding rows that begin with the same blocks, where it pays to attend to those once for all of them.

Contract: looks at block tables only: rows share what the prefix cache, or samples of one prompt, made them share. The
threshold is measured (docs/kernels.md): two calls and a merge cost more than they save where little is shared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

# Least number of rows times shared tokens, by type of device: from here on it was faster.
LEAST_SHARED_TOKENS = {"cpu": 65536}
LEAST_ROWS = 16


class SharedPrefix(NamedTuple):
    """What `hf_paged_kernels.paged_decode_shared` takes.

    Attributes:
        rows: `[R]` int64, the rows that share; None for all.
        num_blocks: how many full blocks they share.
        starts: `[S]` int32, tokens in those blocks for rows that share, 0 for the others.
    """

    rows: torch.Tensor | None
    num_blocks: int
    starts: torch.Tensor


def find_shared_prefix(
    tables: np.ndarray, num_computed: np.ndarray, block_size: int, device: torch.device
) -> SharedPrefix | None:
    """The largest set of rows that begin with one block, if sharing pays.

    Args:
        tables: `[S, columns]`, block tables of layers that see all tokens.
        num_computed: `[S]`, tokens of each row whose KV is written; its next token lies behind them.
    """
    least = LEAST_SHARED_TOKENS.get(device.type)
    if least is None or len(tables) < LEAST_ROWS or int(num_computed.max()) * len(tables) < least:
        return None
    blocks, counts = np.unique(tables[:, 0], return_counts=True)
    rows = (tables[:, 0] == blocks[counts.argmax()]).nonzero()[0]
    if len(rows) < LEAST_ROWS:
        return None
    mine = tables[rows, : int(num_computed[rows].min()) // block_size]
    differs = (mine != mine[0]).any(axis=0)
    num_blocks = int(differs.argmax()) if differs.any() else mine.shape[1]
    if num_blocks * block_size * len(rows) < least:
        return None
    starts = np.zeros(len(tables), dtype=np.int32)
    starts[rows] = num_blocks * block_size
    everyone = len(rows) == len(tables)
    return SharedPrefix(
        None if everyone else torch.from_numpy(rows).to(device), num_blocks, torch.from_numpy(starts).to(device)
    )
