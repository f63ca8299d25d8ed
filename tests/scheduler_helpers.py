"""A scheduler without a model: tokens come from a rule, so that a test sees what each request was given.

Contract: `Simulation` runs steps as the batcher does and asserts after each that arrays, tables and pools agree, that
no budget is passed, that every token is computed once and in order between two preemptions, that no block which
a request writes is held by another one, and that all that a request sees was written for the same tokens as its own:
each slot remembers the tokens up to the one that was written there. With `looks` above 1 it looks at the managers in
every so manyth step only: in between, rows may take blocks that no manager has counted yet, and tokens may wait for
their requests. It then asks no request for its output, either.
"""

from __future__ import annotations

from hf_paged.block_manager import BlockManager
from hf_paged.cache_group import CacheGroup
from hf_paged.config import SchedulerConfig
from hf_paged.prefix_cache import PrefixCache
from hf_paged.request import Request, RequestStatus
from hf_paged.scheduler import Scheduler
from hf_paged_kernels import DecodeRows


def token_of(request: Request, position: int) -> int:
    """The token that a request gets at a position; never 0 and 1."""
    return 2 + (request.key * 31 + position * 7 + request.index) % 97


def tokens_of(request: Request, last: int) -> tuple[int, ...]:
    """The first `last` tokens that a request has or must get."""
    prompt = request.prompt_token_ids
    return (*prompt[:last], *(token_of(request, position) for position in range(len(prompt), last)))


class Simulation:
    """Requests that go through a scheduler over pools of `num_blocks` blocks, one for each window."""

    def __init__(
        self, num_blocks=8, block_size=4, windows=(0,), share=False, hash_function=None, native=True, looks=1, **config
    ) -> None:
        config.setdefault("max_num_batched_tokens", 64)
        self.groups = [CacheGroup(BlockManager(num_blocks, block_size), window) for window in windows]
        hashing = {} if hash_function is None else {"hash_function": hash_function}
        self.prefix = PrefixCache(self.groups, **hashing) if share else None
        rows = DecodeRows if native and DecodeRows.available(len(windows)) else None
        self.scheduler = Scheduler(self.groups, SchedulerConfig(**config), self.prefix, rows)
        self.looks = looks
        self.slots = [{} for _ in self.groups]  # (block, offset) -> tokens up to the one whose KV lies there
        self.num_computed = 0
        self.config = self.scheduler.config
        self.keys = 0
        self.requests: list[Request] = []
        self.stored: dict[int, int] = {}  # request key -> tokens whose KV it has, since it last started
        self.steps = 0

    def add(self, prompt=5, new=4, priority=0, samples=1, eos=(), salt=None) -> Request:
        """Queue a request; `prompt` is its tokens, or how many."""
        tokens, made = range(2, 2 + prompt) if isinstance(prompt, int) else prompt, []
        for index in range(samples):
            self.keys += 1
            made.append(
                Request(
                    f"r{self.keys}",
                    tokens,
                    key=self.keys,
                    max_tokens=len(tokens) + new,
                    cache_salt=salt,
                    eos_token_ids=eos,
                    priority=priority,
                    index=index,
                )
            )
        made[0].samples = made[1:]
        self.scheduler.check_fits(len(tokens), len(tokens) + new)
        self.scheduler.add(made[0])
        self.requests += made
        return made[0]

    def step(self):
        scheduler, batch = self.scheduler, self.scheduler.batch
        output = scheduler.schedule()
        for request in output.preempted:
            assert request.status is RequestStatus.PREEMPTED or request.row >= 0
            self.stored.pop(request.key, None)
        decoding = [batch.requests[row] for row in self._rows(output)]
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert output.num_tokens == len(decoding) + sum(prefill.count for prefill in output.prefills)
        assert batch.num_rows <= self.config.max_num_seqs
        chunks = [(request, int(batch.num_computed[request.row]), 1) for request in decoding]
        chunks += [(prefill.request, prefill.start, prefill.count) for prefill in output.prefills]
        assert len({request.key for request, _, _ in chunks}) == len(chunks)
        for index, copies in enumerate(scheduler.blocks.pending_copies):
            self._copy(self.slots[index], copies)
            copies.clear()
        for request, start, count in chunks:
            if self.prefix is None or request.key in self.stored:
                assert start == self.stored.get(request.key, 0)
            self.num_computed += count
            if self.config.chunked_prefill_size and count > 1:
                assert count <= self.config.chunked_prefill_size
            self._check_blocks(request, start, count)
            self.stored[request.key] = start + count
        tokens = [token_of(request, int(batch.num_tokens[request.row])) for request in decoding]
        for prefill in output.prefills:
            if prefill.is_last:
                for one in (prefill.request, *prefill.samples):
                    tokens.append(token_of(one, one.num_tokens))
                    if one is not prefill.request:
                        self.stored[one.key] = prefill.start + prefill.count
        for request in scheduler.update(output, tokens, {}):
            scheduler.finish(request, scheduler.end_reason(request))
        if self._looks_now():
            scheduler.check_integrity()
        self.steps += 1
        return output

    def _looks_now(self) -> bool:
        return self.steps % self.looks == self.looks - 1

    def _rows(self, output):
        return range(output.num_decode) if output.decode_rows is None else output.decode_rows.tolist()

    def _check_blocks(self, request, start, count) -> None:
        """Each token has a block of its own request, shared with nobody where it is written."""
        batch, size = self.scheduler.batch, self.scheduler.block_size
        for index, group in enumerate(self.groups):
            table = batch.block_tables[index][request.row]
            for position in range(start, start + count):
                block = int(table[position // size])
                assert block >= 0
                if self._looks_now():
                    assert group.manager.requests_of(block) == {request.key}
                self.slots[index][block, position % size] = (request.cache_salt, *tokens_of(request, position + 1))
            window = group.sliding_window
            for position in range(max(0, start - window + 1) if window else 0, start):
                block = int(table[position // size])
                assert block >= 0, f"{request} lost position {position} at {start}"
                seen = self.slots[index][block, position % size]
                assert seen == (request.cache_salt, *tokens_of(request, position + 1)), f"{request} sees {seen}"

    def _copy(self, slots, copies) -> None:
        sources = {slot: tokens for slot, tokens in slots.items() if slot[0] in copies.values()}
        for destination, source in copies.items():
            for offset in range(self.scheduler.block_size):
                if (source, offset) in sources:
                    slots[destination, offset] = sources[source, offset]

    def run(self, limit=5000) -> None:
        """Step until everything has ended, and check what each request got."""
        while self.scheduler.has_unfinished:
            assert self.steps < limit, f"no end after {limit} steps"
            output = self.step()
            assert output.num_tokens > 0 or output.failed, "a step without any progress"
        for request in self.requests:
            if request.finish_reason == "abort":
                continue
            position = len(request.prompt_token_ids)
            for token in request.output_token_ids:
                assert token == token_of(request, position)
                position += 1
            if request.finish_reason == "length":
                assert request.num_tokens == request.max_tokens
            else:
                assert request.finish_reason == "eos" and request.output_token_ids[-1] in request.eos_token_ids
        self.scheduler.check_integrity()
        for group in self.groups:
            assert group.manager.used_blocks == 0
