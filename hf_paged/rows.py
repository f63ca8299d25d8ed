"""The rows of one cache: block tables, lengths, and the slot mapping of a step.

Contract: `Rows` maps the `[batch, columns]` view that transformers has of a cache to requests of a
pool's BlockManager. Layers of one pool share block ids, so the first layer that a forward reaches
reserves the blocks and the others use the same AttentionMetadata. Left padding that is known before
it is written (`row_starts`) is never stored. Reordering and forking touch tables and ref counts only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from .kv_pool import KVPool
from .metadata import AttentionMetadata

_request_ids = itertools.count()


class Rows:
    """Batch rows of one cache over one pool. All methods that change something hold the pool's lock.

    Args:
        pool: where the blocks come from.
        row_starts: `[batch]` int64, columns of left padding of each row, which are not stored.
        shared_rows: rows come in runs of this many copies of one prompt (beams, returned sequences); while
            their K/V agree, each run is stored once.
    """

    def __init__(self, pool: KVPool, row_starts: np.ndarray, shared_rows: int = 1) -> None:
        self.pool = pool
        self.row_starts = row_starts
        self.shared_rows = shared_rows if _in_runs(row_starts, shared_rows) else 1
        self.sliding_window = pool.key.sliding_window
        self.record_past = False
        self.lengths: dict[int, int] = {}  # columns that each layer holds
        self.request_ids: list[int] = []
        with pool.lock:
            for _ in range(len(row_starts)):
                self.request_ids.append(self._new_request())
        self._record_from = 0  # first column kept, while past states are recorded
        self._reset_tables()
        # The list is emptied and filled in place, so that the finalizer frees what is held at the end.
        weakref.finalize(self, pool.discard_later, self.request_ids).atexit = False

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def length(self) -> int:
        """Columns that the longest layer holds."""
        return max(self.lengths.values(), default=0)

    def add_layer(self, layer_idx: int) -> None:
        self.pool.add_layer(layer_idx)
        self.lengths.setdefault(layer_idx, 0)

    def kept_from(self, layer_idx: int) -> int:
        """First column that a layer still offers to attention."""
        if not self.sliding_window:
            return 0
        if self.record_past:
            return self._record_from
        return max(0, self.lengths[layer_idx] - self.sliding_window + 1)

    def first_held(self) -> int:
        """First column whose blocks are certainly still here."""
        return max((self.kept_from(layer_idx) for layer_idx in self.lengths), default=0)

    def activate_past_recording(self) -> None:
        if self.sliding_window and not self.record_past:
            self._record_from = max(0, self.length - self.sliding_window + 1)
            self.record_past = True

    # Writing

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> AttentionMetadata:
        """Append `key [batch, num_kv_heads, T, head_dim_k]` and `value` to a layer.

        Raises:
            RuntimeError: the pool is exhausted; nothing was written and no block is taken.
        """
        first, num_columns = self.lengths[layer_idx], key.shape[2]
        with self.pool.lock:
            step = self._step
            if step is None or (step.first_column, step.num_columns) != (first, num_columns):
                step = self._step = self._reserve(first, num_columns, key, value)
            elif step.shared_rows > 1 and not _rows_agree(key, value, step.shared_rows):
                step = self._step = self._unshare(step)
            tokens = key.shape[0] * num_columns
            self.pool.write(
                layer_idx,
                key.transpose(1, 2).reshape(tokens, key.shape[1], key.shape[3]),
                value.transpose(1, 2).reshape(tokens, value.shape[1], value.shape[3]),
                step.slot_mapping,
            )
            self.lengths[layer_idx] = first + num_columns
        return step

    def _reserve(self, first: int, num_columns: int, key: torch.Tensor, value: torch.Tensor) -> AttentionMetadata:
        self.pool.collect()  # first: what a dead cache shared needs no copy
        self.release_behind_window()
        if self.shared_rows > 1 and not _rows_agree(key, value, self.shared_rows):
            self.shared_rows = 1  # the copies part here; what they wrote so far stays shared
        manager, length, run = self.pool.manager, self.length, self.shared_rows
        if first < length:  # a layer that lags behind rewrites what the group holds already
            self._make_writable(first, min(length, first + num_columns), range(self.num_rows))
        before, after = self._kept(length), self._kept(max(length, first + num_columns))
        grown = (after - before).tolist()
        items = [(self.request_ids[row], grown[row]) for row in range(0, self.num_rows, run)]
        self.pool.ensure_available(manager.blocks_needed_for_append(items))
        copies = manager.append_many(items)
        self.pool.copy_blocks(copies)
        self._share_leaders()
        size = self.pool.block_size
        all_rows = copies or run > 1
        changed = range(self.num_rows) if all_rows else np.flatnonzero(-(-after // size) != -(-before // size)).tolist()
        self._refresh_tables(changed)
        return self._metadata(first, num_columns, run)

    def _unshare(self, step: AttentionMetadata) -> AttentionMetadata:
        """Rows that agreed in an earlier layer of this step differ in this one: give each its own blocks."""
        followers = [row for row in range(self.num_rows) if row % step.shared_rows]
        self._make_writable(step.first_column, step.last_column, followers)
        self.shared_rows = 1
        return self._metadata(step.first_column, step.num_columns, 1)

    def _make_writable(self, first: int, last: int, rows: Sequence[int]) -> None:
        manager = self.pool.manager
        low, high = self._kept(first), self._kept(last)
        size = self.pool.block_size
        # An upper bound suffices: it may only make the pool grow a little early.
        bound = sum(int(-(-high[row] // size) - low[row] // size) for row in rows if high[row] > low[row])
        if self.pool.config.num_blocks is None:
            self.pool.ensure_available(bound)
        try:
            for row in rows:
                if high[row] > low[row]:
                    copies = manager.prepare_write(self.request_ids[row], int(low[row]), int(high[row] - low[row]))
                    self.pool.copy_blocks(copies)
        finally:
            self._refresh_tables(rows)

    def _share_leaders(self) -> None:
        if self.shared_rows == 1:
            return
        manager = self.pool.manager
        for row in range(self.num_rows):
            if row % self.shared_rows:
                manager.free_request(self.request_ids[row])
                manager.fork(self.request_ids[row - row % self.shared_rows], self.request_ids[row])

    def release_behind_window(self) -> None:
        """Give back the blocks that no later query of a sliding-window layer can see."""
        if not self.sliding_window or not self.lengths:
            return
        with self.pool.lock:
            keep_from = min(self.kept_from(layer_idx) for layer_idx in self.lengths)
            blocks = (self._kept(keep_from) // self.pool.block_size).tolist()
            changed = []
            for row, request_id in enumerate(self.request_ids):
                if blocks[row] > self._released[row]:
                    self.pool.manager.release_leading(request_id, blocks[row])
                    self._released[row] = blocks[row]
                    changed.append(row)
            self._refresh_tables(changed)

    # The batch: permuting, cropping, forking

    def select(self, index: Sequence[int]) -> None:
        """Make row i what row `index[i]` was; blocks are shared, none is copied."""
        outside = [row for row in index if not 0 <= row < self.num_rows]
        if outside:
            raise IndexError(f"row {outside[0]} is out of range for a cache of {self.num_rows} rows")
        if list(index) == list(range(self.num_rows)):
            return
        with self.pool.lock:
            manager, old = self.pool.manager, list(self.request_ids)
            kept: set[int] = set()
            new: list[int] = []
            for source in index:
                if source in kept:  # the first row that takes a request keeps it, later ones fork it
                    new.append(next(_request_ids))
                    manager.fork(old[source], new[-1])
                else:
                    kept.add(source)
                    new.append(old[source])
            for row, request_id in enumerate(old):
                if row not in kept:
                    manager.free_request(request_id)
            self.request_ids[:] = new
            self.row_starts = self.row_starts[list(index)]
            self.shared_rows = 1
            self._reset_tables()

    def crop(self, lengths: dict[int, int], kept_from: int) -> None:
        """Cut each layer to `lengths[layer_idx]` columns; `kept_from` is the first column still kept."""
        with self.pool.lock:
            new_length = max(lengths.values(), default=0)
            self.row_starts = np.minimum(self.row_starts, new_length)
            kept = self._kept(new_length)
            for row, request_id in enumerate(self.request_ids):
                if kept[row] < self.pool.manager.num_tokens(request_id):
                    self.pool.manager.truncate(request_id, int(kept[row]))
            self.lengths.update(lengths)
            self._record_from = kept_from
            self._reset_tables()
            self.release_behind_window()

    def roll_back(self, first: int, num_columns: int) -> None:
        """Undo what layers have written of a forward that failed in a later one."""
        step = self._step
        if step is not None and (step.first_column, step.num_columns) == (first, num_columns):
            undone = {layer: first for layer, length in self.lengths.items() if length == first + num_columns}
            starts = self.row_starts
            self.crop({**self.lengths, **undone}, self._record_from)
            self.row_starts = starts  # the padding still ends where it was said to

    def clear(self) -> None:
        """Give every block back; the rows end empty."""
        with self.pool.lock:
            for request_id in self.request_ids:
                self.pool.manager.free_request(request_id)
            self.request_ids[:] = []
            self.lengths = dict.fromkeys(self.lengths, 0)
            self._reset_tables()

    def zero(self) -> None:
        """Keep the lengths and make every stored token zero, in blocks of this cache's own."""
        with self.pool.lock:
            self.pool.collect()
            manager, size = self.pool.manager, self.pool.block_size
            counts = [manager.num_tokens(request_id) for request_id in self.request_ids]
            shared = {b for request in self.request_ids for b in manager.block_table(request) if b >= 0}
            freed = sum(set(self.request_ids) >= manager.requests_of(block) for block in shared)
            self.pool.ensure_available(sum(-(-count // size) for count in counts) - freed)
            for request_id in self.request_ids:
                manager.free_request(request_id)
            for request_id, count in zip(self.request_ids, counts, strict=True):
                self.pool.zero_blocks(manager.allocate_request(request_id, count))
            self._reset_tables()

    def fork(self) -> Rows:
        """Rows of another cache that share every block with these, copied only where either writes."""
        with self.pool.lock:
            twin = Rows(self.pool, self.row_starts.copy(), 1)
            for mine, theirs in zip(self.request_ids, twin.request_ids, strict=True):
                self.pool.manager.free_request(theirs)
                self.pool.manager.fork(mine, theirs)
            twin.lengths = dict(self.lengths)
            twin.record_past, twin._record_from = self.record_past, self._record_from
            twin._reset_tables()
            twin.release_behind_window()
        return twin

    # Reading

    def slots(self, first: int, last: int) -> torch.Tensor:
        """Slots `[batch, last - first]` int64 of a range of columns; -1 where a column is not stored."""
        return torch.from_numpy(self._slots(first, last)).to(self.pool.key.device)

    def _slots(self, first: int, last: int) -> np.ndarray:
        size = self.pool.block_size
        positions = np.arange(first, last)[None] - self.row_starts[:, None]
        held = np.maximum(positions, 0)
        if not self._tables.shape[1]:
            return np.full(positions.shape, -1, dtype=np.int64)
        blocks = np.take_along_axis(self._tables, held // size, axis=1).astype(np.int64)
        return np.where((positions >= 0) & (blocks >= 0), blocks * size + held % size, -1)

    def held_blocks(self) -> set[int]:
        """Ids of the blocks that these rows hold."""
        with self.pool.lock:
            self.pool.collect()
            manager = self.pool.manager
            return {block for request in self.request_ids for block in manager.block_table(request) if block >= 0}

    def stored_tokens(self) -> int:
        """Tokens in the blocks that these rows hold, a shared one counted once."""
        with self.pool.lock:
            manager, size = self.pool.manager, self.pool.block_size
            filled: dict[int, int] = {}
            for request_id in self.request_ids:
                num_tokens = manager.num_tokens(request_id)
                for index, block in enumerate(manager.block_table(request_id)):
                    if block >= 0:
                        filled[block] = max(filled.get(block, 0), min(size, num_tokens - index * size))
            return sum(filled.values())

    def _metadata(self, first: int, num_columns: int, shared_rows: int) -> AttentionMetadata:
        device = self.pool.key.device
        slots = self._slots(first, first + num_columns)
        if shared_rows > 1:
            slots[np.arange(self.num_rows) % shared_rows > 0] = -1  # the leader of the run writes for all
        seq_lens = self._kept(first + num_columns)
        if self._device_tables is None:
            self._device_tables = torch.from_numpy(self._tables.copy()).to(device)
        return AttentionMetadata(
            first_column=first,
            num_columns=num_columns,
            row_starts=self.row_starts,
            block_tables=self._device_tables,
            slot_mapping=torch.from_numpy(slots.reshape(-1)).to(device),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
            max_seq_len=int(seq_lens.max(initial=0)),
            shared_rows=shared_rows,
        )

    # Block tables as an array

    def _kept(self, column: int) -> np.ndarray:
        """Stored tokens of each row when the batch holds `column` columns, `[batch]` int64."""
        return np.maximum(column - self.row_starts, 0)

    def _reset_tables(self) -> None:
        self._step: AttentionMetadata | None = None
        self._device_tables: torch.Tensor | None = None
        self._released = [0] * self.num_rows
        self._tables = np.full((self.num_rows, 0), -1, dtype=np.int32)
        self._refresh_tables(range(self.num_rows))

    def _refresh_tables(self, rows: Sequence[int]) -> None:
        manager = self.pool.manager
        for row in rows:
            table = manager.block_table_view(self.request_ids[row])
            if len(table) > self._tables.shape[1]:
                extra = np.full((self.num_rows, len(table) - self._tables.shape[1]), -1, dtype=np.int32)
                self._tables = np.concatenate([self._tables, extra], axis=1)
            self._tables[row, : len(table)] = table
            self._tables[row, len(table) :] = -1
            self._device_tables = None

    def _new_request(self) -> int:
        request_id = next(_request_ids)
        self.pool.manager.allocate_request(request_id, 0)
        return request_id


def _in_runs(row_starts: np.ndarray, run: int) -> bool:
    """Whether the rows divide into runs of `run` with the same padding."""
    return len(row_starts) % run == 0 and not np.ptp(row_starts.reshape(-1, run), axis=1).any()


def _rows_agree(key: torch.Tensor, value: torch.Tensor, run: int) -> bool:
    """Whether each run of `run` rows holds the same K/V, bit for bit; NaN agrees with nothing.

    A tolerance would be relative to something: where one channel or the bias dominates a vector, as in trained
    models, the K/V of different tokens are close by any such measure.
    """
    for states in (key, value):
        runs = states.detach().reshape(-1, run, *states.shape[1:])
        if not torch.equal(runs[:, 1:], runs[:, :1].expand_as(runs[:, 1:])):
            return False
    return True
