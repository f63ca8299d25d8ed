"""The running requests as arrays, one row each: what a step of steady decode reads and changes.

Contract: rows `0 .. num_rows - 1` are in use and lie together; the first `num_decode` of them are decoding (all of
their tokens but the newest are computed), the others still compute their prompt. A row moves only when a request
leaves or begins to decode. `block_tables[g]` is the block table of group `g`, written only where a block changed.
The tokens of the latest steps lie in an array and reach the lists of the requests when somebody asks for them. What
steady decode does in every step is done in C where there is a library for it (`DecodeRows` of hf_paged_kernels, which
comes as an argument), else in numpy. No torch in this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .request import Request

_FIRST_COLUMNS = 8
RECENT_STEPS = 64  # whose tokens may lie in the array at most


class RunningBatch:
    """Rows of the running requests.

    Args:
        max_num_seqs: rows that there are.
        num_groups: groups of cache layers, each with its own block tables.
        block_size: tokens in a block.
        decode_rows: makes the DecodeRows of `num_groups` and `block_size`; None for numpy.

    Attributes:
        requests: the request of each row in use.
        outputs: for each of them its `noted_token_ids`, the list itself.
        num_recent: steps whose tokens the requests have not got yet.
        native: the DecodeRows, or None.
        num_computed: `[max_num_seqs]` int64, tokens whose KV is written; of a decoding row also the position of the
            token that it computes next.
        seq_lens: `[max_num_seqs]` int32, of a decoding row: its length with that token.
        num_tokens: `[max_num_seqs]` int64, tokens known, prompt and output.
        max_tokens: `[max_num_seqs]` int64, tokens at which the request ends.
        last_token: `[max_num_seqs]` int64, the newest token.
        eos: `[max_num_seqs, columns]` int64, tokens that end the request, -1 where there is none.
        is_plain: `[max_num_seqs]` bool, whether the request's next token is just the most likely one.
        covered: a group each, `[max_num_seqs]` int64: tokens that the row has blocks for.
        released: a group each, `[max_num_seqs]` int64: leading blocks that were given back behind a window.
        slots: a group each, `[max_num_seqs]` int64, of a decoding row: where that token's KV goes. Meaningless while
            no block covers the token.
        block_tables: a group each, `[max_num_seqs, max_blocks]` int32, -1 where there is no block.
        dirty: a group each, `[max_num_seqs]` bool: rows whose block table changed since somebody last unset it.
        tables_version: rises when a table was made larger.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_groups: int,
        block_size: int,
        decode_rows: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.block_size = block_size
        self.requests: list[Request] = []
        self.outputs: list[list[int]] = []
        self.num_decode = 0
        # What rises by one for every decoding row in every step lies together, so that one addition does it.
        self._rising = np.zeros((2 + num_groups, max_num_seqs), dtype=np.int64)
        self.num_computed, self.num_tokens, *self.slots = self._rising
        self.seq_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self.max_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.eos = np.full((max_num_seqs, 1), -1, dtype=np.int64)
        self.is_plain = np.zeros(max_num_seqs, dtype=bool)
        self.covered = [np.zeros(max_num_seqs, dtype=np.int64) for _ in range(num_groups)]
        self.released = [np.zeros(max_num_seqs, dtype=np.int64) for _ in range(num_groups)]
        self.block_tables = [np.full((max_num_seqs, _FIRST_COLUMNS), -1, dtype=np.int32) for _ in range(num_groups)]
        self.dirty = [np.zeros(max_num_seqs, dtype=bool) for _ in range(num_groups)]
        self.tables_version = 0
        self._keys = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._recent = np.zeros((RECENT_STEPS, max_num_seqs), dtype=np.int64)
        self._ended, self._newest = np.zeros((2, max_num_seqs), dtype=np.int64)
        self._newest_address = self._newest.ctypes.data
        self.num_recent = self._recent_rows = 0
        self._noting = False  # whether handing them out was begun
        self._with_eos = 0  # rows that an end-of-sequence token can end
        self._steps_left = 0  # for so many steps no decoding row reaches its length; 0 when that is not known
        self.native = None if decode_rows is None else decode_rows(num_groups, block_size)
        self._bind()

    def _bind(self) -> None:
        """Tell the C code where the arrays are, now and when one is replaced."""
        if self.native is None:
            return
        self.native.bind(
            num_computed=self.num_computed,
            num_tokens=self.num_tokens,
            last_token=self.last_token,
            max_tokens=self.max_tokens,
            keys=self._keys,
            seq_lens=self.seq_lens,
            eos=self.eos,
            recent=self._recent,
            ended=self._ended,
        )
        for index, rows in enumerate(self.native.groups):
            tables = self.block_tables[index]
            rows.point(slots=self.slots[index], covered=self.covered[index], tables=tables, dirty=self.dirty[index])
            rows.columns = tables.shape[1]

    @property
    def num_rows(self) -> int:
        return len(self.requests)

    @property
    def max_num_seqs(self) -> int:
        return len(self.num_computed)

    def add(self, request: Request) -> int:
        """Give a request a row, without any block yet; return it."""
        row = self.num_rows
        self.requests.append(request)
        self.outputs.append(request.noted_token_ids)
        request.row, request.batch = row, self
        self.num_computed[row] = request.num_computed_tokens
        self._keys[row], self._num_prompt[row] = request.key, len(request.prompt_token_ids)
        self.num_tokens[row] = request.num_tokens
        self.max_tokens[row] = request.max_tokens
        self.last_token[row] = (request.output_token_ids or request.prompt_token_ids)[-1]
        if len(request.eos_token_ids) > self.eos.shape[1]:
            wider = np.full((self.max_num_seqs, len(request.eos_token_ids)), -1, dtype=np.int64)
            wider[:, : self.eos.shape[1]] = self.eos
            self.eos = wider
            self._bind()
        self.eos[row] = -1
        self.eos[row, : len(request.eos_token_ids)] = request.eos_token_ids
        self.is_plain[row] = request.is_plain
        self._with_eos += bool(request.eos_token_ids)
        self._steps_left = 0
        for group, covered in enumerate(self.covered):
            covered[row] = self.released[group][row] = 0
            self.block_tables[group][row] = -1
            self.dirty[group][row] = True
        return row

    def begin_decode(self, row: int) -> int:
        """Move a row that has computed its prompt among the decoding ones; return its new place."""
        self.note_tokens()
        first, self._steps_left = self.num_decode, 0
        self._swap(row, first)
        self._set_num_decode(first + 1)
        self.seq_lens[first] = self.num_computed[first] + 1
        for group in range(len(self.slots)):
            self.find_slot(group, first)
        return first

    def _set_num_decode(self, count: int) -> None:
        self.num_decode = count
        if self.native is not None:
            self.native.set_count(count)

    def find_slot(self, group: int, row: int) -> None:
        """Note where the next token of a decoding row goes, after its block table changed."""
        table = self.block_tables[group]
        column, offset = divmod(int(self.num_computed[row]), self.block_size)
        if column < table.shape[1]:  # else there is no block yet
            self.slots[group][row] = int(table[row, column]) * self.block_size + offset

    @property
    def unserved(self) -> int:
        """A bit for each group in which some row has no block yet, after `native.reserve`; all bits without C."""
        return -1 if self.native is None else self.native.unserved

    def note_tokens(self) -> None:
        """Add to the outputs of the requests what the latest steps sampled; it can be cut off and begun again."""
        steps, count = self.num_recent, self._recent_rows
        if not steps:
            return
        # Rows behind these still compute their prompts, and get nothing.
        if steps == 1 and not self._noting:
            tokens = self._recent[0, :count].tolist()
            self._noting = True
            deque(map(list.append, self.outputs, tokens), maxlen=0)  # in C: where somebody follows, in every step
        else:
            self._noting = True
            lengths = (self.num_tokens[:count] - self._num_prompt[:count]).tolist()
            latest = self._recent[:steps, :count].T.tolist()
            for output, length, tokens in zip(self.outputs, lengths, latest, strict=False):
                output.extend(tokens[max(0, steps - (length - len(output))) :])
        self.num_recent = 0
        self._noting = False

    def advance(self, rows: np.ndarray | None, count: int, tokens: Sequence[int]) -> list[int]:
        """Count one token more of decoding rows; return the rows that it ends.

        Args:
            rows: which rows; None for the first `count`.
            tokens: the tokens that follow, a list, or a contiguous tensor of int64 on the host, which is read in place.
        """
        if rows is not None:
            self.note_tokens()
            for row, token in zip(rows.tolist(), tokens, strict=True):
                self.outputs[row].append(token)
            self._rising[:, rows] += 1
            self.seq_lens[rows] += 1
            self.last_token[rows] = tokens
            hit = self.num_tokens[rows] >= self.max_tokens[rows]
            hit |= (self.eos[rows] == self.last_token[rows, None]).any(axis=1)
            return rows[hit].tolist()
        if self.num_recent == RECENT_STEPS:
            self.note_tokens()
        step, self._recent_rows = self.num_recent, count
        if self.native is not None:
            if type(tokens) is list:
                self._newest[:count] = tokens
                num_ended = self.native.advance(self._newest_address, step)
            else:
                num_ended = self.native.advance(tokens.data_ptr(), step)
            self.num_recent = step + 1
            return self._ended[:num_ended].tolist() if num_ended else []
        rising, lens, last = self._rising[:, :count], self.seq_lens[:count], self.last_token[:count]
        last[:] = tokens
        self._recent[step, :count] = last
        np.add(rising, 1, out=rising)
        np.add(lens, 1, out=lens)
        self.num_recent = step + 1
        self._steps_left -= 1
        hit = None
        if self._steps_left <= 0:
            left = self.max_tokens[:count] - self.num_tokens[:count]
            hit = left <= 0
            self._steps_left = int(left.min()) if not hit.any() else 0
        if self._with_eos:
            eos = self.eos[:count]
            ended = eos[:, 0] == last if eos.shape[1] == 1 else (eos == last[:, None]).any(axis=1)
            hit = ended if hit is None else hit | ended
        return [] if hit is None else hit.nonzero()[0].tolist()

    def remove(self, row: int) -> Request:
        """Take a request out; other rows move so that those in use stay together."""
        self.note_tokens()
        request, last = self.requests[row], self.num_rows - 1
        self._with_eos -= bool(request.eos_token_ids)
        self._steps_left = 0
        request.num_computed_tokens = int(self.num_computed[row])
        request.row, request.batch = -1, None
        if row < self.num_decode:
            self._set_num_decode(self.num_decode - 1)
            self._move(self.num_decode, row)
            row = self.num_decode
        self._move(last, row)
        self.requests.pop()
        self.outputs.pop()
        return request

    def clear(self) -> None:
        """Have no row in use."""
        self.note_tokens()
        for request in self.requests:
            request.batch = None
        self.requests.clear()
        self.outputs.clear()
        self._with_eos = self._steps_left = 0
        self._set_num_decode(0)
        self._bind()  # what was cut off may have been between a new array and this

    def set_block(self, group: int, row: int, index: int, block_ids: int | Sequence[int]) -> None:
        """Write block ids into a row's table, from entry `index` on."""
        stop = index + (1 if isinstance(block_ids, int) else len(block_ids))
        if stop > self.block_tables[group].shape[1]:
            self.widen(group, stop)
        self.block_tables[group][row, index:stop] = block_ids
        self.dirty[group][row] = True

    def set_table(self, group: int, row: int, table: Sequence[int]) -> None:
        """Write a row's whole table."""
        self.block_tables[group][row] = -1
        self.set_block(group, row, 0, table)

    def widen(self, group: int, columns: int) -> None:
        """Have room for so many blocks a row at least."""
        old = self.block_tables[group]
        wider = np.full((self.max_num_seqs, max(columns, 2 * old.shape[1])), -1, dtype=np.int32)
        wider[:, : old.shape[1]] = old
        self.block_tables[group] = wider
        self.tables_version += 1
        self._bind()

    def _arrays(self):
        yield from (self.num_computed, self.seq_lens, self.num_tokens, self.max_tokens)
        yield from (self.last_token, self.eos, self.is_plain, self._keys, self._num_prompt)
        yield from self.covered
        yield from self.slots
        yield from self.released
        yield from self.block_tables

    def _move(self, source: int, destination: int) -> None:
        if source == destination:
            return
        for array in self._arrays():
            array[destination] = array[source]
        request = self.requests[source]
        self.requests[destination] = request
        self.outputs[destination] = self.outputs[source]
        request.row = destination
        for dirty in self.dirty:
            dirty[destination] = True

    def _swap(self, row: int, other: int) -> None:
        if row == other:
            return
        for array in self._arrays():
            array[[row, other]] = array[[other, row]]
        for values in (self.requests, self.outputs):
            values[row], values[other] = values[other], values[row]
        self.requests[row].row, self.requests[other].row = row, other
        for dirty in self.dirty:
            dirty[[row, other]] = True
