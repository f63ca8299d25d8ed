"""One packed forward as tensors: inputs, and where each group of layers finds and puts its keys and values.

Contract: the tokens of all sequences lie one after the other, `[1, T]`: first one token of each decoding row, then the
chunks of prompts. `StepBuilder` keeps its buffers: a step of steady decode changes their values and makes no new
tensor, and block tables are not copied at all on a CPU. What it returned for one step is gone with the next one.
Addresses stay the same as long as the number of decoding rows, so a graph of such a step can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .running import RunningBatch
from .scheduler_output import SchedulerOutput
from .shared_prefix import LEAST_ROWS, SharedPrefix, find_shared_prefix


class PackingError(NotImplementedError):
    """A model does something in its forward that goes wrong, or is not known to go right, over packed sequences."""


class PackedGroup:
    """What the attention of one group of layers needs to know of a packed forward. D decoding rows, P chunks.

    Attributes:
        slot_mapping: `[T]` int64, where each token's K and V go.
        decode_tables, decode_lens: `[D, max_blocks]` and `[D]` int32, of the decoding rows; lengths with this token.
        prefill_tables, prefill_lens: `[P, blocks]` and `[P]` int32, of the chunks; lengths with the chunk.
        query_start_loc: `[P + 1]` int32, first token of each chunk, counted from the first chunk's.
        max_decode_len, max_prefill_len, max_query_len: the largest values, known on the host.
        sliding_window: tokens that a query sees, 0 for all.
        shared: blocks that many decoding rows begin with, to be attended to once for all of them, or None.
    """

    __slots__ = (
        "_kv_lens",
        "_serial",
        "block_size",
        "decode_lens",
        "decode_tables",
        "index",
        "max_decode_len",
        "max_prefill_len",
        "max_query_len",
        "prefill_lens",
        "prefill_tables",
        "query_start_loc",
        "shared",
        "sliding_window",
        "slot_mapping",
        "step",
    )

    def __init__(self, step: PackedStep, index: int, sliding_window: int, block_size: int) -> None:
        self.step, self.index, self.sliding_window, self.block_size = step, index, sliding_window, block_size
        self.max_decode_len = self.max_prefill_len = self.max_query_len = 0
        self.shared: SharedPrefix | None = None
        self._serial, self._kv_lens = -1, ([], [], 0)

    def kv_ranges(self) -> tuple[list[int], list[int], int]:
        """First and last (exclusive) position of the keys that each sequence's queries may see, and their sum."""
        step = self.step
        if self._serial != step.serial:
            starts, ends = step.ranges()
            firsts = [max(0, start - self.sliding_window + 1) if self.sliding_window else 0 for start in starts]
            self._kv_lens = (firsts, ends, sum(ends) - sum(firsts))
            self._serial = step.serial
        return self._kv_lens

    def kv_slots(self) -> np.ndarray:
        """Slots of all those keys, one sequence after the other, `[kv_length]` int64."""
        firsts, ends, _ = self.kv_ranges()
        tables, size = self.step.batch.block_tables[self.index], self.block_size
        slots = []
        for row, first, end in zip(self.step.rows(), firsts, ends, strict=True):
            positions = np.arange(first, end)
            slots.append(tables[row][positions // size].astype(np.int64) * size + positions % size)
        return np.concatenate(slots)


class PackedStep:
    """One packed forward of T tokens.

    Attributes:
        input_ids, position_ids: `[1, T]` int64, on the model's first device.
        num_decode: decoding rows; their tokens come first.
        chunks: (start, count) of each chunk, in their order.
        groups: a PackedGroup for each group of layers.
        logits_index: `[N]` int64 positions whose logits are wanted, or None for all T.
        num_logits: N.
        serial: rises with each step, also where the object is used again.
        reads: None, or a list that `note` adds to.
    """

    reads: list[tuple[int | None, int]] | None = None

    def __init__(self, batch: RunningBatch, num_decode: int) -> None:
        self.batch, self.num_decode = batch, num_decode
        self.chunks: list[tuple[int, int]] = []
        self.chunk_rows: list[int] = []
        self.decode_rows: np.ndarray | None = None
        self.groups: list[PackedGroup] = []
        self.logits_index: torch.Tensor | None = None
        self.num_logits = self.serial = 0
        self.input_ids = self.position_ids = None

    def note(self, layer: int | None, sliding_window: int) -> None:
        """Attention has read a layer, or gathered keys and values (None)."""
        if self.reads is not None:
            self.reads.append((layer, sliding_window))

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(count for _, count in self.chunks)

    def rows(self) -> list[int]:
        """Row of each sequence in the running batch."""
        decoding = range(self.num_decode) if self.decode_rows is None else self.decode_rows.tolist()
        return [*decoding, *self.chunk_rows]

    def ranges(self) -> tuple[list[int], list[int]]:
        """First query's position, and length with the last query, of each sequence."""
        rows = slice(0, self.num_decode) if self.decode_rows is None else self.decode_rows
        starts = self.batch.num_computed[rows].tolist()
        ends = [start + 1 for start in starts]
        for start, count in self.chunks:
            starts.append(start)
            ends.append(start + count)
        return starts, ends


class StepBuilder:
    """Turns a SchedulerOutput into tensors.

    Args:
        batch: the scheduler's running requests.
        windows: sliding window of each group, 0 for none.
        block_size: tokens in a block.
        max_tokens: most tokens of a step.
        input_device: where the model takes its input.
        devices: where each group's layers lie.
    """

    def __init__(
        self,
        batch: RunningBatch,
        windows: Sequence[int],
        block_size: int,
        max_tokens: int,
        input_device: torch.device,
        devices: Sequence[torch.device],
    ) -> None:
        self.batch, self.windows, self.block_size = batch, tuple(windows), block_size
        self.input_device, self.devices = input_device, list(devices)
        rows = batch.max_num_seqs
        self._ids, self._positions = (_Buffer(np.zeros(max_tokens, np.int64), input_device) for _ in range(2))
        self._slots = [_Buffer(np.zeros(max_tokens, np.int64), device) for device in self.devices]
        self._lens = [_Buffer(np.zeros(rows, np.int32), device) for device in self.devices]
        self._own = (
            _Buffer(batch.last_token, input_device),
            _Buffer(batch.num_computed, input_device),
            [_Buffer(slots, device) for slots, device in zip(batch.slots, self.devices, strict=True)],
            [_Buffer(batch.seq_lens, device) for device in self.devices],
        )
        self._sends = any(device.type != "cpu" for device in [input_device, *self.devices])
        self._tables = [_Tables(batch, index, device) for index, device in enumerate(self.devices)]
        self._steady: PackedStep | None = None
        self._steady_version = -1
        self._serial = 0

    def build(self, output: SchedulerOutput) -> PackedStep:
        """The tensors of a step; those of the step before are no longer valid."""
        batch, count = self.batch, output.num_decode
        steady = not output.prefills and output.decode_rows is None
        step = self._steady if steady else None
        if step is None or step.num_decode != count or self._steady_version != batch.tables_version:
            step = PackedStep(batch, count)
            step.decode_rows = output.decode_rows
            if not steady:
                self._copy_decode(count, output.decode_rows)
                self._fill_chunks(step, output)
            else:
                step.num_logits = count
            self._make_views(step, steady)
            self._steady, self._steady_version = (step, batch.tables_version) if steady else (None, -1)
        self._serial += 1
        step.serial = self._serial
        if count:
            longest = output.longest
            if not longest:
                rows = slice(0, count) if output.decode_rows is None else output.decode_rows
                longest = int(batch.num_computed[rows].max()) + 1
            for group in step.groups:
                group.max_decode_len = longest
        if self._sends:
            self._send(step, steady)
        return step

    def _copy_decode(self, count: int, rows: np.ndarray | None) -> None:
        """Write the decoding rows' part of every buffer of a step that has more than them."""
        batch, chosen = self.batch, slice(0, count) if rows is None else rows
        self._ids.array[:count] = batch.last_token[chosen]
        self._positions.array[:count] = batch.num_computed[chosen]
        for index, slots in enumerate(self._slots):
            slots.array[:count] = batch.slots[index][chosen]
            self._lens[index].array[:count] = batch.seq_lens[chosen]

    def _fill_chunks(self, step: PackedStep, output: SchedulerOutput) -> None:
        """Write the chunks' part of the token buffers, and say whose logits are wanted."""
        batch, size, at = self.batch, self.block_size, output.num_decode
        wanted: list[np.ndarray | range] = [range(at)]
        for prefill in output.prefills:
            request, start, end = prefill.request, prefill.start, prefill.start + prefill.count
            here = slice(at, at + prefill.count)
            self._ids.array[here] = request.tokens(start, end)
            positions = np.arange(start, end)
            self._positions.array[here] = positions
            for index, slots in enumerate(self._slots):
                row = batch.block_tables[index][request.row]
                slots.array[here] = row[positions // size].astype(np.int64) * size + positions % size
            step.chunks.append((start, prefill.count))
            step.chunk_rows.append(request.row)
            at += prefill.count
            if request.wants_prompt_logits:
                wanted.append(range(at - prefill.count, at))
            elif prefill.is_last:
                wanted.append(range(at - 1, at))
        step.num_logits = sum(map(len, wanted))
        if step.num_logits < at:
            index = np.concatenate([np.asarray(part, dtype=np.int64) for part in wanted])
            # A model may stumble over no position at all; nobody looks at this one.
            index = index if len(index) else np.array([at - 1])
            step.logits_index = torch.from_numpy(index)

    def _make_views(self, step: PackedStep, steady: bool) -> None:
        """The tensors of a step that is not like the one before."""
        count, total = step.num_decode, step.num_tokens
        ids, positions, slots, lens = self._sources(steady)
        step.input_ids = ids.tensor[:total].unsqueeze(0)
        step.position_ids = positions.tensor[:total].unsqueeze(0)
        ends = np.array([start + length for start, length in step.chunks], dtype=np.int32)
        starts = np.zeros(len(ends) + 1, dtype=np.int32)
        np.cumsum([length for _, length in step.chunks], out=starts[1:])
        for index, device in enumerate(self.devices):
            group = PackedGroup(step, index, self.windows[index], self.block_size)
            group.slot_mapping = slots[index].tensor[:total]
            group.decode_lens = lens[index].tensor[:count]
            group.decode_tables = self._tables[index].rows(count, step.decode_rows)
            if not group.sliding_window and count >= LEAST_ROWS:
                rows = slice(0, count) if step.decode_rows is None else step.decode_rows
                tables, computed = self.batch.block_tables[index][rows], self.batch.num_computed[rows]
                group.shared = find_shared_prefix(tables, computed, self.block_size, device)
            if step.chunks:
                blocks = -(-int(ends.max()) // self.block_size)
                tables = self.batch.block_tables[index][step.chunk_rows, :blocks]
                group.prefill_tables = torch.from_numpy(tables).to(device)
                group.prefill_lens = torch.from_numpy(ends).to(device)
                group.query_start_loc = torch.from_numpy(starts).to(device)
                group.max_prefill_len = int(ends.max())
                group.max_query_len = max(length for _, length in step.chunks)
            step.groups.append(group)

    def _sources(self, steady: bool) -> tuple:
        """Token ids, positions, slots and lengths: the running batch's own arrays where a step is decoding alone."""
        if steady:
            return self._own
        return self._ids, self._positions, self._slots, self._lens

    def _send(self, step: PackedStep, steady: bool) -> None:
        """Bring what changed to devices that do not read host memory."""
        ids, positions, slots, lens = self._sources(steady)
        ids.send(step.num_tokens)
        positions.send(step.num_tokens)
        for index, tables in enumerate(self._tables):
            slots[index].send(step.num_tokens)
            lens[index].send(step.num_decode)
            tables.refresh()


class _Buffer:
    """A host array and the device tensor that follows it; on a CPU they are the same memory."""

    def __init__(self, array: np.ndarray, device: torch.device) -> None:
        self.array, self._host = array, torch.from_numpy(array)
        self.is_same = device.type == "cpu"
        self.tensor = self._host if self.is_same else torch.zeros_like(self._host, device=device)

    def send(self, count: int) -> None:
        if not self.is_same and count:
            self.tensor[:count].copy_(self._host[:count])


class _Tables:
    """The block tables of a group on its device; elsewhere than on a CPU only changed rows are sent."""

    def __init__(self, batch: RunningBatch, index: int, device: torch.device) -> None:
        self._batch, self._index, self._device = batch, index, device
        self._array: np.ndarray | None = None
        self._tensor: torch.Tensor | None = None

    def refresh(self) -> torch.Tensor:
        """The tensor `[max_num_seqs, max_blocks]`, up to date."""
        array = self._batch.block_tables[self._index]
        if self._device.type == "cpu":
            if array is not self._array:
                self._array, self._tensor = array, torch.from_numpy(array)
            return self._tensor
        dirty = self._batch.dirty[self._index]
        if array is not self._array:
            self._array, self._tensor = array, torch.from_numpy(array).to(self._device)
        elif dirty.any():
            rows = dirty.nonzero()[0]
            index = torch.from_numpy(rows).to(self._device)
            self._tensor.index_copy_(0, index, torch.from_numpy(array[rows]).to(self._device))
        dirty[:] = False
        return self._tensor

    def rows(self, count: int, chosen: np.ndarray | None) -> torch.Tensor:
        tensor = self.refresh()
        if chosen is None:
            return tensor[:count]
        return tensor.index_select(0, torch.from_numpy(chosen).to(self._device))
