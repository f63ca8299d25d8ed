"""Blocks that can be found again by the tokens that they hold, as a tree: a node each, below the block before it.

Contract: a node stands for the tokens of one block behind those of all its ancestors, and says in which block of each
group of layers their keys and values lie. Nodes are found by a hash over (parent's hash, tokens), and compared token by
token and by the parent itself, so that equal hashes of different tokens do no harm. No torch in this file.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence

NO_BLOCK = -1

HashFunction = Callable[[int, Sequence[int], tuple], int]


def chain_hash(parent: int, tokens: Sequence[int], extra: tuple = ()) -> int:
    """Hash of a block's tokens behind a parent: 64 bits of BLAKE2b, the same in every process.

    Args:
        parent: the hash of the block before it, 0 for none.
        tokens: its token ids.
        extra: what else the keys and values depend on; of a chain's root alone.
    """
    data = struct.pack(f"<{len(tokens)}q", *tokens)
    if extra:
        data += repr(extra).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=parent.to_bytes(8, "little")).digest(), "little")


class Node:
    """Tokens of one block behind those of its ancestors.

    Attributes:
        parent: the block before it; None for a root, which stands for no tokens.
        tokens: its token ids; fewer than a block's in a partial node, which has no children.
        depth: blocks from the root to this one, itself included.
        hash: of the chain up to it.
        blocks: the block of each group of layers, NO_BLOCK where there is none.
        children: nodes below it, by their first token; of one token the one added first comes first.
        is_alive: whether it can be found.
    """

    __slots__ = ("__weakref__", "blocks", "children", "depth", "hash", "is_alive", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], node_hash: int, num_groups: int) -> None:
        self.parent, self.tokens, self.hash = parent, tokens, node_hash
        self.depth = 0 if parent is None else parent.depth + 1
        self.blocks = [NO_BLOCK] * num_groups
        self.children: dict[int, dict[Node, None]] = {}  # many prompts begin alike: taking one out is one look-up
        self.is_alive = True

    def below(self) -> Iterator[Node]:
        """This node and all below it."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            for children in node.children.values():
                todo += children


class PrefixTree:
    """The nodes, by what they depend on, by hash, and by block.

    Args:
        num_groups: groups of layers.
        block_size: tokens in a block.
        hash_function: (parent hash, tokens, extra) -> hash of a block.
    """

    def __init__(self, num_groups: int, block_size: int, hash_function: HashFunction = chain_hash) -> None:
        self.num_groups, self.block_size, self.hash_function = num_groups, block_size, hash_function
        # A root lives as long as a node or a request is behind it: there may be a salt for each of many users.
        self.roots: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
        self._by_hash: dict[int, list[Node]] = {}
        self.of_block: list[dict[int, Node]] = [{} for _ in range(num_groups)]

    def root(self, extra: tuple) -> Node:
        """The start of every chain that depends on `extra`."""
        node = self.roots.get(extra)
        if node is None:
            node = self.roots[extra] = Node(None, (), self.hash_function(0, (), extra), self.num_groups)
        return node

    def hash_of(self, parent: Node, tokens: tuple[int, ...]) -> int:
        """The hash of the node of these tokens below another."""
        return self.hash_function(parent.hash, tokens, ())

    def find(self, parent: Node, tokens: tuple[int, ...], node_hash: int) -> Node | None:
        """The node of a whole block's tokens below another, by their `hash_of`."""
        for node in self._by_hash.get(node_hash, ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def add(self, parent: Node, tokens: tuple[int, ...], node_hash: int) -> Node:
        """A new node; one of fewer tokens than a block is not found by `find`, only among its parent's children."""
        node = Node(parent, tokens, node_hash, self.num_groups)
        parent.children.setdefault(tokens[0], {})[node] = None
        if len(tokens) == self.block_size:
            self._by_hash.setdefault(node.hash, []).append(node)
        return node

    def place(self, node: Node, group: int, block: int) -> Node | None:
        """Say where a node's keys and values lie; return the node that had the block before and has none now."""
        before = self.of_block[group].get(block)
        if before is not None:
            before.blocks[group] = NO_BLOCK
        node.blocks[group] = block
        self.of_block[group][block] = node
        return before

    def clear(self, node: Node, group: int) -> None:
        """Say that a node's keys and values lie nowhere in a group."""
        del self.of_block[group][node.blocks[group]]
        node.blocks[group] = NO_BLOCK

    def fade(self, node: Node) -> None:
        """Forget a node, and those above it, that neither lie anywhere nor lead to one that does."""
        while node.parent is not None and node.is_alive and not node.children and not self.lies_somewhere(node):
            self._unlink(node)
            node = node.parent

    def lies_somewhere(self, node: Node) -> bool:
        return node.blocks.count(NO_BLOCK) < self.num_groups

    def drop(self, top: Node) -> list[tuple[Node, list[int]]]:
        """Make a node and all below it unfindable; return those that lay somewhere, and where."""
        dropped = []
        for node in list(top.below()):
            if self.lies_somewhere(node):
                dropped.append((node, list(node.blocks)))
                for group, block in enumerate(node.blocks):
                    if block != NO_BLOCK:
                        self.clear(node, group)
            self._forget_hash(node)
            node.is_alive = False
        if top.parent is not None:
            self._unlink(top)
            self.fade(top.parent)
        else:
            for extra in [extra for extra, root in self.roots.items() if root is top]:
                del self.roots[extra]
        return dropped

    def _forget_hash(self, node: Node) -> None:
        found = self._by_hash.get(node.hash)
        if found and node in found:
            if len(found) == 1:
                del self._by_hash[node.hash]
            else:
                found.remove(node)

    def _unlink(self, node: Node) -> None:
        self._forget_hash(node)
        node.is_alive = False
        children, token = node.parent.children, node.tokens[0]
        siblings = children.get(token)
        if siblings and node in siblings:
            if len(siblings) == 1:
                del children[token]
            else:
                del siblings[node]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        for root in list(self.roots.values()):
            for node in root.below():
                if node is not root:
                    yield node

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless tree, hashes and blocks agree. Slow."""
        of_block: list[dict[int, Node]] = [{} for _ in range(self.num_groups)]
        hashed = 0
        for node in self.nodes():
            whole = len(node.tokens) == self.block_size
            hashed += whole
            found = node in self._by_hash.get(node.hash, ())
            lost = not node.children and not self.lies_somewhere(node)
            if not node.is_alive or found != whole or lost or (node.children and not whole):
                raise AssertionError(
                    f"node {node.tokens} at depth {node.depth}: whole {whole}, hashed {found}, {lost=}"
                )
            for group, block in enumerate(node.blocks):
                if block != NO_BLOCK:
                    of_block[group][block] = node
        if of_block != self.of_block or hashed != sum(map(len, self._by_hash.values())):
            raise AssertionError(f"blocks {self.of_block} are listed, the nodes have {of_block}")
