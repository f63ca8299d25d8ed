"""The blocks of the running requests: what each row holds in each group of layers.

Contract: `BatchBlocks` keeps the running batch's block tables in step with the groups' block managers, which count
some of the blocks of decoding rows later (see `BlocksAhead`). A row is reserved to the end of a block, so that most
steps of decode change nothing here; a request never writes a block that another one holds, and begins on the blocks
that the prefix cache finds. Copies that this takes are noted in `pending_copies`. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocks_ahead import MOST, BlocksAhead
from .cache_group import CacheGroup
from .prefix_cache import PrefixCache, PrefixHit
from .request import Request
from .running import RunningBatch


class BatchBlocks:
    """The running batch's rows over the groups' blocks.

    Args:
        batch: the rows.
        groups: the groups, all of one block size.
        prefix: finds and records blocks; None: nothing is shared but by samples of one prompt.

    Attributes:
        pending_copies: for each group the copies, destination -> source, that storage makes before the next forward;
            whoever makes them empties it.
    """

    def __init__(self, batch: RunningBatch, groups: Sequence[CacheGroup], prefix: PrefixCache | None = None) -> None:
        self.batch, self.groups, self.block_size, self.prefix = batch, list(groups), batch.block_size, prefix
        self.pending_copies: list[dict[int, int]] = [{} for _ in self.groups]
        if batch.native is not None:
            for group, rows in zip(self.groups, batch.native.groups, strict=True):
                group.ahead = BlocksAhead(rows, max(MOST, batch.max_num_seqs))

    # Decoding rows

    def extend_all(self) -> bool:
        """Give every decoding row that needs one the block of its next token; False where there are too few.

        Where rows take blocks in C, that was tried just before, and only what it left is done here.
        Groups that were served before one that could not be keep what they got; it is used the next time.
        """
        batch, count, unserved = self.batch, self.batch.num_decode, self.batch.unserved
        for index, group in enumerate(self.groups):
            if unserved >> index & 1:
                short = (batch.num_computed[:count] >= batch.covered[index][:count]).nonzero()[0]
                if len(short) and not self._extend(index, short.tolist()):
                    return False
                group.offer(len(short))
        return True

    def extend(self, request: Request) -> bool:
        """Give one decoding request the block of its next token in each group, where it needs one."""
        batch, row = self.batch, request.row
        return all(
            batch.num_computed[row] < batch.covered[index][row] or self._extend(index, [row])
            for index in range(len(self.groups))
        )

    def _extend(self, index: int, rows: Sequence[int]) -> bool:
        # A few rows in most steps: plain numbers cost less here than arrays of that length.
        batch, group, size = self.batch, self.groups[index], self.block_size
        manager, requests = group.manager, batch.requests
        if group.sliding_window:
            for row in rows:
                self._release_behind_window(index, row)
        ends = batch.covered[index][rows].tolist()
        partial = [(row, end) for row, end in zip(rows, ends, strict=True) if end % size]
        if partial:
            if not self._fill_up(index, partial, num_others=len(rows) - len(partial)):
                return False
            at_end = [(row, end) for row, end in zip(rows, ends, strict=True) if not end % size]
            rows, ends = [row for row, _ in at_end], [end for _, end in at_end]
        elif not group.ensure(len(rows)):
            return False
        # Whole blocks, so that the next steps need nothing; the token goes to the first slot.
        blocks = manager.append_blocks([requests[row].key for row in rows])
        last_column = max(ends, default=0) // size
        if last_column >= batch.block_tables[index].shape[1]:
            batch.widen(index, last_column + 1)
        tables, slots, covered = batch.block_tables[index], batch.slots[index], batch.covered[index]
        for row, end, block in zip(rows, ends, blocks, strict=True):
            tables[row, end // size] = block
            slots[row] = block * size
            covered[row] = end + size
        batch.dirty[index][rows] = True
        return True

    def _fill_up(self, index: int, partial: Sequence[tuple[int, int]], num_others: int) -> bool:
        """Reserve rows to the end of the block that they are in, a copy of it where other samples hold it as well.

        False, and nothing, where there are too few blocks for that and for `num_others` more.
        """
        batch, group, size = self.batch, self.groups[index], self.block_size
        items = [(batch.requests[row].key, size - end % size) for row, end in partial]
        if not group.ensure(num_others + group.manager.blocks_needed_for_append(items)):
            return False
        self._note(index, group.manager.append_many(items))
        for (row, end), (key, count) in zip(partial, items, strict=True):
            column = end // size
            batch.set_block(index, row, column, group.manager.block_table_view(key)[column])
            batch.covered[index][row] = end + count
            batch.find_slot(index, row)
        return True

    def record_all(self) -> None:
        """Make findable what the decoding rows have written since the last time: somebody is about to look.

        Nobody looks in most steps, and a row's blocks are recorded at the latest when it gives them back.
        """
        if self.prefix is not None:
            size, count = self.block_size, self.batch.num_decode
            for request, computed in zip(self.batch.requests, self.batch.num_computed[:count].tolist(), strict=False):
                node = request.prefix_node
                if node is not None and computed >= (node.depth + 1) * size:
                    self.prefix.record(request, computed)

    # Prompts

    def start(self, request: Request, hit: PrefixHit | None = None) -> None:
        """Begin a request, with the blocks that were found of it."""
        batch = self.batch
        batch.add(request)
        row = request.row
        if self.prefix is not None:
            self.prefix.begin(request, hit)
        if hit is None:
            for group in self.groups:
                group.manager.allocate_request(request.key, 0)
            return
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            group.manager.adopt(request.key, blocks, hit.num_tokens)
        num_tokens = hit.num_tokens + self._copy_part(request, hit)
        for index, group in enumerate(self.groups):
            batch.covered[index][row] = num_tokens
            batch.released[index][row] = group.first_block_seen(hit.num_tokens)
            batch.set_table(index, row, group.manager.block_table_view(request.key))
        batch.num_computed[row] = num_tokens
        self.prefix.took(request, num_tokens)

    def _copy_part(self, request: Request, hit: PrefixHit) -> int:
        """Give a request a copy of the block of which it shares a part, where there is one; return those tokens."""
        for group, source in zip(self.groups, hit.source, strict=False):
            group.manager.pool.touch(source)
        if not hit.num_partial or not all(group.ensure(1) for group in self.groups):
            return 0
        for index, (group, source) in enumerate(zip(self.groups, hit.source, strict=True)):
            group.manager.append_tokens(request.key, hit.num_partial)
            copy = group.manager.block_table_view(request.key)[-1]
            self._note(index, [(source, copy)])
        return hit.num_partial

    def fitting(self, request: Request) -> int:
        """Tokens that a request can be computed further with the blocks that it has and those that can be had."""
        batch, row, fitting = self.batch, request.row, []
        for index, group in enumerate(self.groups):
            if group.sliding_window:
                self._release_behind_window(index, row)
            held = -(-int(batch.covered[index][row]) // self.block_size)
            fitting.append((held + group.available_blocks) * self.block_size - int(batch.num_computed[row]))
        return min(fitting)

    def append(self, request: Request, end: int) -> bool:
        """Have blocks for a request's tokens up to `end`; False, and nothing lost, where growing fails."""
        batch, size, row = self.batch, self.block_size, request.row
        for index, group in enumerate(self.groups):
            covered = int(batch.covered[index][row])
            if end <= covered:
                continue
            items = [(request.key, end - covered)]
            if not group.ensure(group.manager.blocks_needed_for_append(items)):
                return False
            self._note(index, group.manager.append_many(items))
            first = covered // size
            batch.set_block(index, row, first, group.manager.block_table_view(request.key)[first:])
            batch.covered[index][row] = end
        return True

    def fork(self, request: Request, sample: Request) -> None:
        """Start a sample of a prompt, decoding, on the blocks that hold the prompt."""
        batch, source = self.batch, request.row
        sample.num_computed_tokens = computed = int(batch.num_computed[source])
        row = batch.begin_decode(batch.add(sample))
        source = request.row  # it may have moved
        for index, group in enumerate(self.groups):
            if batch.covered[index][source] > computed:
                group.manager.truncate(request.key, computed)
                batch.covered[index][source] = computed
                batch.set_table(index, source, group.manager.block_table_view(request.key))
            group.manager.fork(request.key, sample.key)
            batch.covered[index][row] = computed
            batch.released[index][row] = batch.released[index][source]
            batch.set_table(index, row, group.manager.block_table_view(sample.key))
        sample.prefix_node = request.prefix_node

    # Giving back, and counting

    def free(self, request: Request) -> None:
        """Take a request out of the batch and give its blocks back; they stay findable while nobody needs them."""
        if self.prefix is not None:
            self.prefix.record(request, int(self.batch.num_computed[request.row]), tail=True)
            request.prefix_node = None  # a result that is kept must not keep a tree that was dropped
        self.batch.remove(request.row)
        for group in self.groups:
            group.manager.free_request(request.key)

    def reset(self) -> None:
        """Have every block free and no row in use, also after something was cut off half-way."""
        for group, copies in zip(self.groups, self.pending_copies, strict=True):
            group.reset()
            copies.clear()
        self.batch.clear()
        if self.prefix is not None:
            self.prefix.forget()

    def owed(self, index: int, request: Request, chunk: int) -> int:
        """Blocks that a running request still needs for its present tokens."""
        held = -(-int(self.batch.covered[index][request.row]) // self.block_size)
        held -= int(self.batch.released[index][request.row])
        return max(0, self.groups[index].blocks_for(request.num_tokens, chunk) - held)

    def _release_behind_window(self, index: int, row: int) -> None:
        batch, group = self.batch, self.groups[index]
        gone = group.first_block_seen(int(batch.num_computed[row]))
        before = int(batch.released[index][row])
        if gone > before:
            if self.prefix is not None:
                self.prefix.record(batch.requests[row], int(batch.num_computed[row]))
            group.manager.release_leading(batch.requests[row].key, gone)
            batch.released[index][row] = gone
            batch.set_block(index, row, before, [-1] * (gone - before))

    def _note(self, index: int, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.pending_copies[index][destination] = source

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless arrays, block tables and pools agree. Slow."""
        batch = self.batch
        if self.prefix is not None:
            self.prefix.check_integrity()
        for index, group in enumerate(self.groups):
            manager = group.manager
            manager.check_integrity()
            if manager.num_requests != batch.num_rows:
                raise AssertionError(f"{manager.num_requests} block tables for {batch.num_rows} running requests")
            for row, request in enumerate(batch.requests):
                table, mine = manager.block_table_view(request.key), batch.block_tables[index][row]
                if mine[: len(table)].tolist() != table or (mine[len(table) :] != -1).any():
                    raise AssertionError(f"row {row} has block table {mine.tolist()}, {request} has {table}")
                covered, computed = int(batch.covered[index][row]), int(batch.num_computed[row])
                if manager.num_tokens(request.key) != covered or computed > covered:
                    raise AssertionError(f"row {row} counts {computed} of {covered} covered tokens: {request}")
                if row < batch.num_decode and computed < covered:
                    slot = table[computed // self.block_size] * self.block_size + computed % self.block_size
                    if batch.slots[index][row] != slot:
                        raise AssertionError(f"row {row} writes slot {batch.slots[index][row]}, not {slot}: {request}")
        for row, request in enumerate(batch.requests):
            behind = request.num_tokens - int(batch.num_computed[row])
            decoding = row < batch.num_decode
            if request.row != row or batch.num_tokens[row] != request.num_tokens or (decoding and behind != 1):
                raise AssertionError(f"row {row} does not fit {request}, which is {behind} tokens behind")
