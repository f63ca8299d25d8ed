"""Who holds which block of the KV pool: reference counts, block tables, copy-on-write.

Nothing here touches K or V: a block is a number, and whoever owns the tensors keeps one place for each.
The contract of this file:

- A request's block table always has `ceil(num_tokens / block_size)` entries. Token `i` lives in block
  `table[i // block_size]` at offset `i % block_size`.
- Several tables may hold one block. Its ref count is the number of tables that hold it; it is free at 0.
- A block that another request also holds is never written. Operations that announce a write return copies
  `(source_block_id, destination_block_id)`, and storage makes all of them before it writes the first token.
  A destination is always a block that was free before the call; a source stays held after it.
- All or nothing: a call that raises has changed nothing. ValueError is for what the caller gave,
  RuntimeError for a pool that is too small.

Nothing here locks: one thread at a time. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .block_pool import BlockPool, check_count
from .block_table import NULL_BLOCK, BlockTable, check_tables

AppendItems = Sequence[tuple[Hashable, int]]  # (request_id, num_tokens)
Copies = list[tuple[int, int]]  # (source_block_id, destination_block_id)


class BlockManager:
    """One block table per request over a `BlockPool`. A request id is any hashable value.

    Each method that takes the id of an existing request raises ValueError when there is none such; each count
    that is negative or not an int (a bool is not) is a ValueError, too.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Make a manager of `num_blocks` (0 or more) free blocks of `block_size` tokens, and no request."""
        self._pool = BlockPool(num_blocks, block_size)
        self._block_size = block_size
        self._requests: dict[Hashable, BlockTable] = {}
        self._holders: dict[int, set[Hashable]] = {}  # the reverse index, of held blocks only

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """All blocks, held and free."""
        return self._pool.num_blocks

    @property
    def available_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self._pool.available_blocks

    @property
    def pool(self) -> BlockPool:
        """The physical blocks, for whoever says which of them are kept when they are free."""
        return self._pool

    @property
    def used_blocks(self) -> int:
        """Held blocks; one that several requests share counts once."""
        return self.num_blocks - self.available_blocks

    @property
    def utilization(self) -> float:
        """Held blocks as a share of all, 0.0 for an empty pool."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def num_requests(self) -> int:
        """Requests that have a block table, an empty one included."""
        return len(self._requests)

    def requests(self) -> list[Hashable]:
        """Return the ids of all requests, the oldest first."""
        return list(self._requests)

    def __contains__(self, request_id: object) -> bool:
        """Return whether the request has a block table here."""
        return request_id in self._requests

    def block_table(self, request_id: Hashable) -> list[int]:
        """Return a copy of the request's block table."""
        return list(self._get(request_id).blocks)

    def block_table_view(self, request_id: Hashable) -> list[int]:
        """Return the live block table, for hot paths: read-only for callers, and it follows every change.

        It stays the same list until the request is freed, and means nothing after that.
        """
        return self._get(request_id).blocks

    def num_tokens(self, request_id: Hashable) -> int:
        """Return how many tokens the block table covers, those of NULL_BLOCK entries included."""
        return self._get(request_id).num_tokens

    def ref_count(self, block_id: int) -> int:
        """Return how many requests hold the block. ValueError when there is no such block."""
        return self._pool.ref_count(block_id)

    def requests_of(self, block_id: int) -> frozenset[Hashable]:
        """Return the ids of the requests that hold the block. ValueError when there is no such block."""
        return frozenset(self._holders[block_id]) if self._pool.ref_count(block_id) else frozenset()

    def can_allocate(self, num_tokens: int) -> bool:
        """Return whether a new request of `num_tokens` tokens would find its blocks."""
        check_count("num_tokens", num_tokens)
        return self._blocks_for(num_tokens) <= self._pool.available_blocks

    def can_append(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Return whether `append_tokens` with these arguments would find its blocks."""
        return self.can_append_many(((request_id, num_tokens),))

    def can_append_many(self, items: AppendItems) -> bool:
        """Return whether `append_many` with these items would find its blocks."""
        return self.blocks_needed_for_append(items) <= self._pool.available_blocks

    def blocks_needed_for_append(self, items: AppendItems) -> int:
        """Return exactly how many free blocks `append_many` with these items takes, copies included."""
        return self._plan_append(items)[2]

    def grow(self, num_new_blocks: int) -> None:
        """Add free blocks, with ids from the present `num_blocks` upward."""
        self._pool.grow(num_new_blocks)

    def allocate_request(self, request_id: Hashable, num_tokens: int) -> list[int]:
        """Start a request of `num_tokens` tokens and return a copy of its block table, empty for 0 tokens.

        ValueError when the request exists; RuntimeError when the pool has too few free blocks.
        """
        self._check_new(request_id)
        check_count("num_tokens", num_tokens)
        need = self._blocks_for(num_tokens)
        self._pool.require(need, f"allocating request {request_id!r} (num_tokens {num_tokens})")
        blocks = [self._take(request_id) for _ in range(need)]
        self._requests[request_id] = BlockTable(request_id, blocks, num_tokens)
        return list(blocks)

    def adopt(self, request_id: Hashable, blocks: Sequence[int], num_tokens: int) -> None:
        """Start a request of `num_tokens` tokens on full blocks that are held or cached; nothing is copied.

        Leading NULL_BLOCK entries stand for blocks that it does not need. ValueError when the request exists, when
        the blocks are not those of so many tokens, or when one of them is neither held nor cached.
        """
        self._check_new(request_id)
        check_count("num_tokens", num_tokens)
        if len(blocks) * self._block_size != num_tokens:
            raise ValueError(f"cannot adopt {len(blocks)} blocks of {self._block_size} tokens for {num_tokens} tokens")
        held = [block_id for block_id in blocks if block_id != NULL_BLOCK]
        num_null = len(blocks) - len(held)
        if NULL_BLOCK in blocks[num_null:] or len(set(held)) != len(held):
            raise ValueError(f"cannot adopt {list(blocks)}: NULL_BLOCK may only lead, and no block be there twice")
        for index, block_id in enumerate(held):
            try:
                self._pool.acquire(block_id)
            except ValueError:
                for acquired in reversed(held[:index]):
                    self._pool.release(acquired)
                raise
        for block_id in held:
            self._holders.setdefault(block_id, set()).add(request_id)
        self._requests[request_id] = BlockTable(request_id, list(blocks), num_tokens, num_null)

    def append_tokens(self, request_id: Hashable, num_tokens: int = 1) -> Copies:
        """Add `num_tokens` tokens at the end of one request: `append_many` with one item."""
        return self.append_many(((request_id, num_tokens),))

    def append_many(self, items: AppendItems) -> Copies:
        """Add tokens at the end of several requests, all of them or none.

        Takes `(request_id, num_tokens)` items, each request at most once. Returns the copies that storage
        makes before it writes: one for each partly filled last block that another request holds as well,
        except that when all holders of a block write, the last of them in `items` keeps it. ValueError for a
        request named twice; RuntimeError with fewer free blocks than `blocks_needed_for_append(items)`.
        """
        counts, changing, need = self._plan_append(items)
        copies: Copies = []
        if changing:
            others = f" and {len(changing) - 1} more" if len(changing) > 1 else ""
            self._pool.require(need, f"appending to {changing[0]}{others}")
        for request in changing:
            room = len(request.blocks) * self._block_size - request.num_tokens
            # Asked afresh: the copies made so far may have left this request as the block's only holder.
            if room and self._pool.ref_counts[request.blocks[-1]] > 1:
                copies.append(self._copy_on_write(request, len(request.blocks) - 1))
            new_blocks = self._blocks_for(request.num_tokens + counts[request]) - len(request.blocks)
            request.blocks.extend([self._take(request.request_id) for _ in range(new_blocks)])
        for request, count in counts.items():
            request.num_tokens += count
        return copies

    def append_blocks(self, request_ids: Sequence[Hashable]) -> list[int]:
        """Add one block of tokens to each of several requests whose blocks are all full; return the new blocks.

        The same as `append_many` with `block_size` tokens each, for what a step of decoding does most. ValueError
        for a request whose last block has room (nothing changes); RuntimeError when the pool has too few free blocks.
        """
        block_size, found = self._block_size, self._requests
        requests = [found.get(request_id) or self._get(request_id) for request_id in request_ids]
        for request in requests:
            if request.num_tokens % block_size:
                raise ValueError(f"cannot append a whole block, the last one has room in {request}: use append_many")
        blocks = self._pool.allocate_many(len(requests))
        holders = self._holders
        for request, block_id in zip(requests, blocks, strict=True):
            holders[block_id] = {request.request_id}
            request.blocks.append(block_id)
            request.num_tokens += block_size
        return blocks

    def prepare_write(self, request_id: Hashable, first_token: int, num_tokens: int) -> Copies:
        """Make ready to rewrite `num_tokens` tokens from `first_token` on, which the table covers already.

        Returns the copies that storage makes before it writes: one for each of their blocks that another
        request holds as well. ValueError when the tokens reach beyond the request's or into a NULL_BLOCK
        entry; RuntimeError when the pool has too few free blocks.
        """
        request = self._get(request_id)
        check_count("first_token", first_token)
        check_count("num_tokens", num_tokens)
        end, first_block = first_token + num_tokens, first_token // self._block_size
        if end > request.num_tokens:
            raise ValueError(f"cannot write tokens {first_token} up to {end}, they are beyond {request}")
        if num_tokens and first_block < request.num_null:
            raise ValueError(f"cannot write token {first_token}, block {first_block} is gone in {request}")
        indices = range(first_block, self._blocks_for(end)) if num_tokens else ()
        shared = [index for index in indices if self._pool.ref_counts[request.blocks[index]] > 1]
        self._pool.require(len(shared), f"writing tokens {first_token} up to {end} of {request}")
        return [self._copy_on_write(request, index) for index in shared]

    def share_prefix(self, src_request_id: Hashable, num_blocks: int, dst_request_id: Hashable) -> None:
        """Start request `dst_request_id` with the first `num_blocks` blocks of another; nothing is copied.

        ValueError when dst exists, when src has fewer blocks, when the last of them is not full (`fork`
        shares that as well), or when one of them is NULL_BLOCK.
        """
        src = self._get(src_request_id)
        self._check_new(dst_request_id)
        check_count("num_blocks", num_blocks)
        num_tokens = num_blocks * self._block_size
        if num_blocks > len(src.blocks):
            raise ValueError(f"cannot share {num_blocks} blocks, more than there are in {src}")
        if num_tokens > src.num_tokens:
            raise ValueError(f"cannot share {num_blocks} blocks, the last is not full in {src}: use fork")
        if num_blocks and src.num_null:
            raise ValueError(f"cannot share {num_blocks} blocks, entry 0 is NULL_BLOCK in {src}")
        self._share(src, dst_request_id, num_blocks, num_tokens)

    def fork(self, src_request_id: Hashable, dst_request_id: Hashable) -> None:
        """Start request `dst_request_id` with all tokens and blocks of another, a partly filled one included.

        Nothing is copied until one of the two writes. ValueError when dst exists.
        """
        src = self._get(src_request_id)
        self._check_new(dst_request_id)
        self._share(src, dst_request_id, len(src.blocks), src.num_tokens)

    def truncate(self, request_id: Hashable, num_tokens: int) -> list[int]:
        """Drop tokens off the end so that `num_tokens` stay; return the ids of the blocks that are free now.

        ValueError when the request has fewer, or when the block that would be its last is NULL_BLOCK.
        """
        request = self._get(request_id)
        check_count("num_tokens", num_tokens)
        if num_tokens > request.num_tokens:
            raise ValueError(f"cannot truncate to {num_tokens} tokens, more than there are in {request}")
        keep = self._blocks_for(num_tokens)
        if 0 < keep <= request.num_null:
            raise ValueError(f"cannot truncate to {num_tokens} tokens, block {keep - 1} is gone in {request}")
        freed = self._give_back(request, max(keep, request.num_null), len(request.blocks))
        del request.blocks[keep:]
        request.num_tokens = num_tokens
        request.num_null = min(request.num_null, keep)
        return freed

    def release_leading(self, request_id: Hashable, num_blocks: int) -> list[int]:
        """Give back the first `num_blocks` blocks; return the ids of those that are free now.

        Their entries become NULL_BLOCK; entries that already are cost nothing. ValueError when one of the
        blocks is not full.
        """
        request = self._get(request_id)
        check_count("num_blocks", num_blocks)
        if num_blocks * self._block_size > request.num_tokens:
            raise ValueError(f"cannot release {num_blocks} leading blocks, more than are full in {request}")
        first = request.num_null
        if num_blocks <= first:
            return []
        freed = self._give_back(request, first, num_blocks)
        request.blocks[first:num_blocks] = [NULL_BLOCK] * (num_blocks - first)
        request.num_null = num_blocks
        return freed

    def free_request(self, request_id: Hashable) -> list[int]:
        """End the request; return the ids of its blocks that are free now, which no other request holds."""
        request = self._get(request_id)
        del self._requests[request_id]
        return self._give_back(request, request.num_null, len(request.blocks))

    def reset(self) -> None:
        """Forget every request and have all blocks free, also after an operation that was cut off half-way."""
        on_evict = self._pool.on_evict
        self._pool = BlockPool(self._pool.num_blocks, self._block_size)
        self._pool.on_evict = on_evict
        self._requests, self._holders = {}, {}

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless pool, tables and reverse index agree. Slow."""
        self._pool.check_integrity()
        check_tables(self._requests.values(), self._holders, self._pool)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _get(self, request_id: Hashable) -> BlockTable:
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"unknown request {request_id!r}, none of the {len(self._requests)} held here")
        return request

    def _check_new(self, request_id: Hashable) -> None:
        if request_id in self._requests:
            raise ValueError(f"there is already a {self._requests[request_id]}")

    def _plan_append(self, items: AppendItems) -> tuple[dict[BlockTable, int], list[BlockTable], int]:
        """Check the items and change nothing.

        Returns each request's count, the requests whose tables change, and the free blocks that takes. It
        runs for every request in every step: hence the local names, and no call in the common case.
        """
        requests, ref_counts, block_size = self._requests, self._pool.ref_counts, self._block_size
        counts: dict[BlockTable, int] = {}
        changing: list[BlockTable] = []
        writers: dict[int, int] = {}  # shared block -> how many requests of this call write into it
        need = 0
        for request_id, count in items:
            request = requests.get(request_id) or self._get(request_id)
            if type(count) is not int or count < 0:
                check_count("num_tokens", count)
            counts[request] = count
            blocks = request.blocks
            room = len(blocks) * block_size - request.num_tokens
            writes_shared = room and count and ref_counts[blocks[-1]] > 1
            if count > room or writes_shared:
                changing.append(request)
                need += max(0, self._blocks_for(count - room))
                if writes_shared:
                    writers[blocks[-1]] = writers.get(blocks[-1], 0) + 1
        if len(counts) != len(items):
            ids = [request_id for request_id, _ in items]
            twice = next(request_id for request_id in ids if ids.count(request_id) > 1)
            raise ValueError(f"request {twice!r} is in {ids.count(twice)} items of one append: add them up")
        for block_id, num_writers in writers.items():
            # The last holder of a block writes in place, so k copies, or k - 1 when all holders write.
            need += min(num_writers, ref_counts[block_id] - 1)
        return counts, changing, need

    def _take(self, request_id: Hashable) -> int:
        block_id = self._pool.allocate()
        self._holders[block_id] = {request_id}
        return block_id

    def _copy_on_write(self, request: BlockTable, index: int) -> tuple[int, int]:
        """Put a block of its own into the request's table in place of one that others hold as well."""
        source, destination = request.blocks[index], self._take(request.request_id)
        self._pool.release(source)
        self._holders[source].remove(request.request_id)
        request.blocks[index] = destination
        return source, destination

    def _share(self, src: BlockTable, dst_request_id: Hashable, num_blocks: int, num_tokens: int) -> None:
        blocks = src.blocks[:num_blocks]
        num_null = min(src.num_null, num_blocks)
        for block_id in blocks[num_null:]:
            self._pool.acquire(block_id)
            self._holders[block_id].add(dst_request_id)
        self._requests[dst_request_id] = BlockTable(dst_request_id, blocks, num_tokens, num_null)

    def _give_back(self, request: BlockTable, start: int, stop: int) -> list[int]:
        """Release table entries, the last first so that reuse goes in table order; return the free ones."""
        freed = []
        for block_id in reversed(request.blocks[start:stop]):
            if self._pool.release(block_id):
                del self._holders[block_id]
                freed.append(block_id)
            else:
                self._holders[block_id].remove(request.request_id)
        return freed[::-1]
