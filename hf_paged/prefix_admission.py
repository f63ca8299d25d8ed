"""What waiting requests find of their tokens, and which of them had better wait a step.

Contract: made anew for the admissions of one step. A request whose next block an earlier one is computing now waits
until that one has written it: so requests that arrive together compute what they share once. Without a prefix cache
nothing is found and nobody waits. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .cache_group import CacheGroup
from .prefix_cache import PrefixCache, PrefixHit
from .request import Request


class PrefixAdmission:
    """The prefix cache as the admissions of one step see it.

    Args:
        prefix: what finds blocks, or None.
        groups: the groups of layers.
        running: requests that still compute their prompts.
        waited: what `waiting` was at the admissions before these.

    Attributes:
        waiting: key of a request that waits -> the one that it waits for, and how many whole blocks they share. So the
            next step need not look its tokens up again: with many requests that takes longer than all else.
    """

    def __init__(
        self,
        prefix: PrefixCache | None,
        groups: Sequence[CacheGroup],
        running: Iterable[Request],
        waited: Mapping[int, tuple[Request, int]],
    ) -> None:
        self._prefix, self._groups, self._waited = prefix, groups, waited
        self.waiting: dict[int, tuple[Request, int]] = {}
        self._computing: set[int] = set()
        self._under_way: dict = {}  # the next whole block of each prompt -> the request that computes it
        for request in running:
            self.note(request)

    def note(self, request: Request) -> None:
        """Count a request among those that compute their prompts."""
        prefix = self._prefix
        self._computing.add(request.key)
        if prefix is not None and (block := prefix.next_block(request, request.prefix_node)) is not None:
            self._under_way.setdefault(block, request)

    def still_waits(self, request: Request) -> bool:
        """Whether the request that this one waited for goes on computing what they share."""
        other, shared = self._waited.get(request.key, (None, 0))
        if other is None or other.key not in self._computing:
            return False
        node = other.prefix_node
        if node is None or not node.is_alive or node.depth >= shared:
            return False
        self.waiting[request.key] = other, shared
        return True

    def match(self, request: Request) -> PrefixHit | None:
        """What is there of a request; None where nothing may be used, since all of its logits are wanted."""
        if self._prefix is None or request.wants_prompt_logits:
            return None
        return self._prefix.match(request)

    def waits(self, request: Request, hit: PrefixHit | None) -> bool:
        """Whether an earlier request computes the block that this one needs next; it is there after a step."""
        if hit is None or not self._under_way:
            return False
        other = self._under_way.get(self._prefix.next_block(request, hit.node))
        if other is None or other.order > request.order:
            return False
        self.waiting[request.key] = other, self._prefix.num_shared(request, other)
        return True

    def need(self, index: int, request: Request, hit: PrefixHit | None, chunk: int) -> int:
        """Free blocks of a group that a request takes, cached ones that it has back included."""
        group = self._groups[index]
        need = group.blocks_for(request.num_tokens, chunk)
        if hit is None:
            return need
        ref_counts = group.manager.pool.ref_counts
        return need - sum(ref_counts[block] > 0 for block in hit.blocks[index] if block >= 0)
