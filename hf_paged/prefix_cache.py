"""Which blocks hold the beginning of a request's tokens already, from another request or an earlier one.

Contract: a block is found only after its keys and values were written, by tokens that are compared one by one, and
only where everything else that they depend on is the same: adapter, `cache_salt`, and the weights (who notices that
they changed calls `reset`). A request never writes a block that it found; of one that it shares in part it gets a copy.
Free blocks stay findable until they are needed. No torch in this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from .cache_group import CacheGroup
from .prefix_tree import NO_BLOCK, HashFunction, Node, PrefixTree, chain_hash
from .request import Request

# How many children of a node, those added last, are compared token by token when a hit may end inside a block.
MAX_PARTIAL_CANDIDATES = 8


class PrefixHit(NamedTuple):
    """What is there of a request's tokens.

    Attributes:
        node: the last whole block's node, or the root.
        blocks: for each group the blocks of those tokens, leading ones that a window has passed NO_BLOCK.
        source: for each group the block that holds `num_partial` tokens more; empty where there are none.
        num_tokens: tokens in whole blocks.
        num_partial: tokens behind them.
    """

    node: Node
    blocks: list[list[int]]
    source: Sequence[int]
    num_tokens: int
    num_partial: int


class BlockEvent(NamedTuple):
    """A block of tokens that became findable ("stored") or stopped being so ("evicted", "invalidated").

    Attributes:
        block_hash, parent_hash: of the chain up to it, and up to the block before it.
        token_ids: its tokens.
    """

    block_hash: int
    parent_hash: int
    token_ids: tuple[int, ...]


class Invalidated(NamedTuple):
    """What `invalidate` made unfindable.

    Attributes:
        block_ids: blocks, a tuple for each group of layers, whose pools number their own.
        request_keys: running requests that hold one of them, or are computing the same tokens.
    """

    block_ids: tuple[tuple[int, ...], ...]
    request_keys: frozenset[int]


class PrefixCache:
    """The findable blocks of a batcher.

    Args:
        groups: the groups of layers, all of one block size.
        hash_function: see `PrefixTree`; for tests and for routers with a hash of their own.
        content_key: what the content of all blocks depends on beside the requests; () for nothing. Hashes tell it
            apart, so that an outside router does not take blocks of another format for these.

    Attributes:
        num_queried, num_hit: tokens that were looked for, and that were found.
        num_evicted, num_invalidated: blocks that stopped being findable.
        on_event: told of (kind, BlockEvent), or None.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], hash_function: HashFunction = chain_hash, content_key: tuple = ()
    ) -> None:
        self.groups, self._content_key = list(groups), content_key
        self.block_size = size = groups[0].manager.block_size
        self.tree = PrefixTree(len(self.groups), size, hash_function)
        self.num_queried = self.num_hit = self.num_evicted = self.num_invalidated = 0
        self.on_event: Callable[[str, BlockEvent], None] | None = None
        self._fewest = max(2, size // 8)  # tokens for which a block is copied
        for index, group in enumerate(self.groups):
            group.manager.pool.on_evict = lambda block, index=index: self._evicted(index, block)

    # Finding

    def root(self, request: Request) -> Node:
        """Where a request's chain starts, by what its keys and values depend on beside tokens and weights."""
        adapter, salt = request.adapter_name, request.cache_salt
        own = () if adapter is None is salt else (adapter, salt)
        return self.tree.root((*self._content_key, *own))

    def match(self, request: Request) -> PrefixHit:
        """What is there of a request's tokens, its last one left out: that one is always computed."""
        size, limit = self.block_size, request.num_tokens - 1
        root = self.root(request)
        path, node = [], root
        for start in range(0, limit - size + 1, size):
            tokens = request.token_tuple(start, start + size)
            node = self.tree.find(node, tokens, self.tree.hash_of(node, tokens))
            if node is None:
                break
            path.append(node)
        count = self._usable(path)
        node = path[count - 1] if count else root
        start = count * size
        blocks = []
        for index, group in enumerate(self.groups):
            first = group.first_block_seen(start)
            blocks.append([NO_BLOCK] * first + [one.blocks[index] for one in path[first:count]])
        source, partial = self._inside(node, request.token_tuple(start, min(limit, start + size)))
        return PrefixHit(node, blocks, source.blocks if source else (), start, partial)

    def _usable(self, path: Sequence[Node]) -> int:
        """The most blocks of a path from which every group has what the next token sees."""
        count = len(path)
        for index, group in enumerate(self.groups):
            if not group.sliding_window:
                count = next((i for i, node in enumerate(path[:count]) if node.blocks[index] == NO_BLOCK), count)
        windows = [(index, group) for index, group in enumerate(self.groups) if group.sliding_window]
        while count and windows:
            gaps = [
                next((i for i in range(count - 1, first - 1, -1) if path[i].blocks[index] == NO_BLOCK), -1)
                for index, group in windows
                if (first := group.first_block_seen(count * self.block_size)) < count
            ]
            gap = max(gaps, default=-1)
            if gap < 0:
                break
            count = gap  # a shorter prefix must not need that block: try those before it
        return count

    def _inside(self, node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that shares most of the next tokens, and how many those are."""
        best, most = None, self._fewest - 1
        for child in self._latest(node, tokens[0]) if tokens else ():
            if NO_BLOCK in child.blocks:
                continue
            shared = 0
            for mine, its in zip(tokens, child.tokens, strict=False):
                if mine != its:
                    break
                shared += 1
            if shared > most:
                best, most = child, shared
        return best, most if best else 0

    def _latest(self, node: Node, token: int) -> Iterable[Node]:
        """The children that begin with a token, a few of those added last."""
        return islice(reversed(node.children.get(token, {})), MAX_PARTIAL_CANDIDATES)

    def next_block(self, request: Request, node: Node | None) -> tuple[int, tuple[int, ...]] | None:
        """What names the whole block that comes behind a node in a request, before it can be found."""
        if node is None or not node.is_alive:
            return None
        start = node.depth * self.block_size
        if start + self.block_size >= request.num_tokens:
            return None
        return id(node), request.token_tuple(start, start + self.block_size)

    def num_shared(self, request: Request, other: Request) -> int:
        """Whole blocks, the last token of either left out, that begin both."""
        most = (min(request.num_tokens, other.num_tokens) - 1) // self.block_size
        lengths = range(0, most * self.block_size + 1, self.block_size)
        first_unequal = bisect_left(
            lengths, True, key=lambda length: request.token_tuple(0, length) != other.token_tuple(0, length)
        )
        return first_unequal - 1

    def took(self, request: Request, num_tokens: int) -> None:
        """Count what a request was given of a match."""
        self.num_queried += request.num_tokens
        self.num_hit += num_tokens

    # Recording

    def begin(self, request: Request, hit: PrefixHit | None) -> None:
        """Have a request's blocks recorded from here on, behind those that it found."""
        request.prefix_node = self.root(request) if hit is None else hit.node

    def record(self, request: Request, num_computed: int, tail: bool = False) -> None:
        """Make the whole blocks of a request's first tokens findable, whose keys and values are written.

        Args:
            tail: the rest of those tokens, in a block that is partly filled, as well.
        """
        node, size = request.prefix_node, self.block_size
        if node is None:
            return
        if not node.is_alive:
            request.prefix_node = None
            return
        tables = None
        for depth in range(node.depth, num_computed // size):
            tables = tables or [group.manager.block_table_view(request.key) for group in self.groups]
            tokens = request.token_tuple(depth * size, depth * size + size)
            node_hash = self.tree.hash_of(node, tokens)
            child = self.tree.find(node, tokens, node_hash) or self.tree.add(node, tokens, node_hash)
            self._place(child, [table[depth] for table in tables])
            request.prefix_node = node = child
        if tail and num_computed - node.depth * size >= self._fewest:
            tokens = request.token_tuple(node.depth * size, num_computed)
            if not any(child.tokens[: len(tokens)] == tokens for child in self._latest(node, tokens[0])):
                tables = tables or [group.manager.block_table_view(request.key) for group in self.groups]
                child = self.tree.add(node, tokens, self.tree.hash_of(node, tokens))
                self._place(child, [table[node.depth] for table in tables])

    def _place(self, node: Node, blocks: Sequence[int]) -> None:
        tree = self.tree
        was_findable = tree.lies_somewhere(node)
        for index, block in enumerate(blocks):
            if block == NO_BLOCK or node.blocks[index] != NO_BLOCK:
                continue  # given back behind a window, or there already in another request's block
            before = tree.place(node, index, block)
            self.groups[index].manager.pool.keep(block)
            if before is not None:  # the same block, partly filled
                tree.fade(before)
        if was_findable:
            return
        if not tree.lies_somewhere(node):
            tree.fade(node)
        elif self.on_event is not None:
            self._tell("stored", node)

    # Forgetting

    def _evicted(self, index: int, block: int) -> None:
        tree = self.tree
        node = tree.of_block[index][block]
        tree.clear(node, index)
        self.num_evicted += 1
        if not tree.lies_somewhere(node):
            if self.on_event is not None:
                self._tell("evicted", node)
            if not node.children:
                tree.fade(node)

    def invalidate(
        self, token_ids: Sequence[int] | None, block: int | None, group: int, running: Sequence[Request]
    ) -> Invalidated:
        """Make unfindable what begins with these tokens, or the block and what lies behind it.

        Args:
            running: the running requests; those that compute the same tokens record nothing more.
        """
        if block is not None:
            tops = [self.tree.of_block[group][block]] if block in self.tree.of_block[group] else []
        else:
            tops = [top for root in list(self.tree.roots.values()) for top in self._beginning(root, tuple(token_ids))]
        touched: set[int] = set()
        blocks: list[list[int]] = [[] for _ in self.groups]
        for top in tops:
            if top.is_alive:
                self._drop(top, blocks, touched)
        for request in running:
            mine = request.token_tuple(0, len(token_ids)) if token_ids is not None else ()
            same = token_ids is not None and mine == tuple(token_ids)
            # Whoever holds a dropped block has only what lies behind it still to record.
            if same or request.key in touched or (request.prefix_node is not None and not request.prefix_node.is_alive):
                request.prefix_node = None
                touched.add(request.key)
        return Invalidated(tuple(map(tuple, blocks)), frozenset(touched))

    def _beginning(self, root: Node, tokens: tuple[int, ...]) -> list[Node]:
        """The first nodes below a root of everything that begins with tokens, or begins as they do."""
        first = tokens[: self.block_size]
        return [child for child in root.children.get(first[0], ()) if _agree(child.tokens, first)] if first else []

    def _drop(self, top: Node, blocks: list[list[int]], touched: set[int]) -> None:
        for node, lay in self.tree.drop(top):
            self.num_invalidated += 1
            self._tell("invalidated", node)
            for index, block in enumerate(lay):
                if block != NO_BLOCK:
                    manager = self.groups[index].manager
                    touched |= manager.requests_of(block)
                    manager.pool.drop(block)
                    blocks[index].append(block)

    def reset(self) -> Invalidated:
        """Make everything unfindable; blocks that requests hold stay theirs."""
        blocks: list[list[int]] = [[] for _ in self.groups]
        touched: set[int] = set()
        for root in list(self.tree.roots.values()):
            self._drop(root, blocks, touched)
        return Invalidated(tuple(map(tuple, blocks)), frozenset(touched))

    def forget(self) -> None:
        """Begin anew beside block managers that were reset."""
        for root in list(self.tree.roots.values()):
            for node in root.below():
                node.is_alive = False
                if self.tree.lies_somewhere(node):
                    self._tell("invalidated", node)
        self.tree = PrefixTree(len(self.groups), self.block_size, self.tree.hash_function)

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found, of all groups."""
        return sum(group.manager.pool.cached_blocks for group in self.groups)

    def _tell(self, kind: str, node: Node) -> None:
        if self.on_event is not None and len(node.tokens) == self.block_size:
            self.on_event(kind, BlockEvent(node.hash, node.parent.hash, node.tokens))

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless tree and pools agree. Slow."""
        self.tree.check_integrity()
        for index, group in enumerate(self.groups):
            kept = group.manager.pool.kept_blocks()
            if kept != set(self.tree.of_block[index]):
                raise AssertionError(f"the pool keeps {sorted(kept)}, findable are {sorted(self.tree.of_block[index])}")


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether one of two sequences begins with the other."""
    return all(mine == its for mine, its in zip(one, other, strict=False))
