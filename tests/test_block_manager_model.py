"""Random operations on a BlockManager against a naive model.

The model (`ManagerAgainstModel`) keeps the contents of every request as a list and a storage of blocks, makes
the copies it is told to make, writes tokens through the block tables, and reads every request back.
"""

from __future__ import annotations

from block_helpers import refuses
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.block_manager import NULL_BLOCK, BlockManager

GONE = object()  # what a read of a NULL_BLOCK entry gives
POISON = object()  # what a free block holds
BLOCK_SIZES = [1, 2, 3, 4, 4, 17]


class ManagerAgainstModel(RuleBasedStateMachine):
    """Storage is a dict block_id -> contents; a request is the list of tokens its table must read back."""

    @initialize(num_blocks=st.integers(0, 16), block_size=st.sampled_from(BLOCK_SIZES), data=st.data())
    def start(self, num_blocks, block_size, data):
        self.manager = BlockManager(num_blocks, block_size)
        self.block_size = block_size
        self.storage = {block_id: [POISON] * block_size for block_id in range(num_blocks)}
        self.contents: dict[int, list] = {}
        self.next_request = 0
        self.next_token = 0
        if num_blocks >= 4:  # something to share, from the first step on
            self.allocate_tokens(data.draw(st.integers(2 * block_size, 4 * block_size), label="count"))
            self.fork(data)

    # what the model knows by counting over all tables

    def holders(self) -> dict[int, set[int]]:
        holders: dict[int, set[int]] = {}
        for request_id in self.contents:
            for block_id in self.manager.block_table(request_id):
                if block_id != NULL_BLOCK:
                    holders.setdefault(block_id, set()).add(request_id)
        return holders

    def free(self) -> int:
        return self.manager.num_blocks - len(self.holders())

    def attempt(self, should_succeed, error, operation, *args):
        """Run the operation: it must succeed or raise as the model says, and change nothing if it raises."""
        if should_succeed:
            return getattr(self.manager, operation)(*args)
        match = "cannot" if error is ValueError else "needs .* available of"
        refuses(self.manager, error, match, operation, *args)
        return None

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.contents)), label="request")

    def new_request(self) -> int:
        self.next_request += 1
        return self.next_request

    def count(self, data, limit: int) -> int:
        """Draw from 0 to limit, both ends often, and now and then one more."""
        usual, edges = st.integers(0, limit), st.sampled_from([0, limit, limit + 1])
        return data.draw(st.one_of(usual, usual, usual, edges), label="count")

    # what storage does

    def make(self, copies):
        sources = {source for source, _ in copies}
        destinations = [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for source, destination in copies:
            assert self.storage[destination] == [POISON] * self.block_size
            self.storage[destination] = list(self.storage[source])

    def write(self, request_id, first, count):
        table = self.manager.block_table(request_id)
        for position in range(first, first + count):
            self.next_token += 1
            self.storage[table[position // self.block_size]][position % self.block_size] = self.next_token
            tokens = self.contents[request_id]
            tokens[position : position + 1] = [self.next_token]

    def poison(self, before, freed):
        """Blocks that lost their last holder must be the ones returned; from now on they hold rubbish."""
        gone = before.keys() - self.holders().keys()
        assert sorted(freed) == sorted(gone)
        for block_id in gone:
            self.storage[block_id] = [POISON] * self.block_size

    # operations

    @precondition(lambda self: len(self.contents) < 6)
    @rule(data=st.data())
    def allocate(self, data):
        self.allocate_tokens(self.count(data, 4 * self.block_size))

    def allocate_tokens(self, count):
        request_id = self.new_request()
        need = -(-count // self.block_size)
        assert self.manager.can_allocate(count) is (need <= self.free())
        table = self.attempt(need <= self.free(), RuntimeError, "allocate_request", request_id, count)
        if table is not None:
            assert table == self.manager.block_table(request_id) and len(table) == need
            self.contents[request_id] = []
            self.write(request_id, 0, count)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def append(self, data):
        request_id = self.pick(data)
        count = self.count(data, 2 * self.block_size)
        self.append_items([(request_id, count)], "append_tokens", request_id, count)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def append_many(self, data):
        chosen = data.draw(st.permutations(sorted(self.contents)), label="order")
        chosen = chosen[: data.draw(st.integers(0, len(chosen)), label="how many")]
        one = data.draw(st.booleans(), label="one token each")
        items = [(r, 1 if one else self.count(data, self.block_size)) for r in chosen]
        self.append_items(items, "append_many", items)

    def append_items(self, items, operation, *args):
        writers: dict[int, int] = {}
        need = 0
        for request_id, count in items:
            held, table = len(self.contents[request_id]), self.manager.block_table(request_id)
            need += -(-(held + count) // self.block_size) - len(table)
            if count and held % self.block_size:
                writers[table[-1]] = writers.get(table[-1], 0) + 1
        for block_id, num_writers in writers.items():
            num_holders = len(self.holders()[block_id])
            need += num_writers if num_writers < num_holders else num_holders - 1
        free = self.free()
        assert self.manager.blocks_needed_for_append(items) == need
        assert self.manager.can_append_many(items) is (need <= free)
        copies = self.attempt(need <= free, RuntimeError, operation, *args)
        if copies is not None:
            assert self.free() == free - need
            self.make(copies)
            for request_id, count in items:
                self.write(request_id, len(self.contents[request_id]), count)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def rewrite(self, data):
        request_id = self.pick(data)
        table, held, holders = self.manager.block_table(request_id), self.contents[request_id], self.holders()
        first = self.count(data, len(held))
        count = self.count(data, max(0, len(held) - first))
        written = {i // self.block_size for i in range(first, first + count)}
        fits = first + count <= len(held) and all(table[index] != NULL_BLOCK for index in written)
        need = sum(len(holders[table[index]]) > 1 for index in written) if fits else 0
        error = RuntimeError if fits else ValueError
        should_succeed = fits and need <= self.free()
        copies = self.attempt(should_succeed, error, "prepare_write", request_id, first, count)
        if copies is not None:
            assert len(copies) == need
            self.make(copies)
            self.write(request_id, first, count)

    @precondition(lambda self: 0 < len(self.contents) < 10)
    @rule(data=st.data())
    def fork(self, data):
        src, dst, free = self.pick(data), self.new_request(), self.free()
        self.manager.fork(src, dst)
        self.contents[dst] = list(self.contents[src])
        assert self.manager.block_table(dst) == self.manager.block_table(src) and self.free() == free

    @precondition(lambda self: 0 < len(self.contents) < 10)
    @rule(data=st.data())
    def share_prefix(self, data):
        src, dst, free = self.pick(data), self.new_request(), self.free()
        table = self.manager.block_table(src)
        count = self.count(data, len(table))
        prefix, num_tokens = table[:count], count * self.block_size
        fine = num_tokens <= len(self.contents[src]) and NULL_BLOCK not in prefix
        self.attempt(fine, ValueError, "share_prefix", src, count, dst)
        if fine:
            self.contents[dst] = self.contents[src][:num_tokens]
            assert self.manager.block_table(dst) == prefix and self.free() == free

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def truncate(self, data):
        request_id, before = self.pick(data), self.holders()
        held, table = self.contents[request_id], self.manager.block_table(request_id)
        count = self.count(data, len(held))
        fine = count <= len(held) and (count == 0 or table[(count - 1) // self.block_size] != NULL_BLOCK)
        freed = self.attempt(fine, ValueError, "truncate", request_id, count)
        if fine:
            del held[count:]
            self.poison(before, freed)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def release_leading(self, data):
        request_id, before = self.pick(data), self.holders()
        held = self.contents[request_id]
        full = len(held) // self.block_size
        count = self.count(data, full)
        freed = self.attempt(count <= full, ValueError, "release_leading", request_id, count)
        if count <= full:
            held[: count * self.block_size] = [GONE] * (count * self.block_size)
            self.poison(before, freed)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def free_request(self, data):
        request_id, before = self.pick(data), self.holders()
        freed = self.manager.free_request(request_id)
        del self.contents[request_id]
        self.poison(before, freed)

    @rule(count=st.integers(0, 3))
    def grow(self, count):
        present = self.manager.num_blocks
        self.manager.grow(count)
        self.storage.update({present + i: [POISON] * self.block_size for i in range(count)})

    # what must hold after each

    @invariant()
    def all_requests_read_back_their_own_tokens(self):
        for request_id, tokens in self.contents.items():
            table = self.manager.block_table(request_id)
            assert self.manager.num_tokens(request_id) == len(tokens)
            assert len(table) == -(-len(tokens) // self.block_size)
            blocks = [table[i // self.block_size] for i in range(len(tokens))]
            read = [
                GONE if block_id == NULL_BLOCK else self.storage[block_id][i % self.block_size]
                for i, block_id in enumerate(blocks)
            ]
            assert read == tokens

    @invariant()
    def the_counts_are_right(self):
        self.manager.check_integrity()
        holders = self.holders()
        assert self.manager.requests() == list(self.contents)
        assert self.manager.used_blocks == len(holders)
        assert self.manager.num_blocks == len(self.storage)
        for block_id in self.storage:
            assert self.manager.requests_of(block_id) == holders.get(block_id, set())
            assert self.manager.ref_count(block_id) == len(holders.get(block_id, set()))


TestManagerAgainstModel = ManagerAgainstModel.TestCase
TestManagerAgainstModel.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],  # explaining a failure takes minutes here
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
