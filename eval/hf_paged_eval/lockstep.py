"""Windows of tokens through the paged cache of one model, under one or two cache settings at once.

Contract: `run_windows` feeds every window in chunks and hands each position's logits to `on_chunk` exactly once, in
order within a window, for all settings together; no logits are kept after that. All of them see the same windows in
the same steps, so that equal settings give equal bits. Keys and values are read back from the blocks, those of the
chunk itself included. A model that cannot be packed runs window by window over a `PagedCache`.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Sequence

import torch

from hf_paged import ContinuousBatcher, PackingError, PagedCache, PagedCacheConfig

# on_chunk(window, start, logits): logits of positions start.. of a window, `[tokens, vocab]`, one for each setting.
OnChunk = Callable[[int, int, Sequence[torch.Tensor]], None]


def run_windows(
    model,
    windows: Sequence[Sequence[int]],
    configs: Sequence[PagedCacheConfig],
    on_chunk: OnChunk,
    *,
    chunk_size: int,
    batch_size: int,
) -> bool:
    """Run all windows.

    Args:
        model: a causal model of transformers, in eval mode.
        windows: the tokens to feed; none is empty.
        configs: one or more settings of the cache; prefixes are not shared, since all logits are wanted.
        on_chunk: gets the logits.
        chunk_size: tokens of one window in one forward.
        batch_size: windows that run at the same time.
    Returns:
        Whether they were packed; if not, each window ran alone.
    Raises:
        ValueError: a window has more tokens than the model has positions, or than fit into the blocks.
    """
    configs = [dataclasses.replace(config, enable_prefix_caching=False) for config in configs]
    # The longest first: it takes the most steps, and the others fill them up.
    order = sorted(range(len(windows)), key=lambda window: -len(windows[window]))
    try:
        sides = _open_sides(model, configs, chunk_size, batch_size)
    except PackingError:
        chunk_size = chunk_size if _chunks_work(model) else None
        for window in order:
            _run_alone(model, configs, window, windows[window], on_chunk, chunk_size)
        return False
    try:
        _run_packed(sides, windows, order, _Pairs(len(sides), on_chunk), batch_size)
    finally:
        for side in sides:
            side.batcher.close()
    return True


class _Side:
    """A batcher, and how far it is."""

    def __init__(self, batcher: ContinuousBatcher, config: PagedCacheConfig) -> None:
        self.batcher, self.config = batcher, config
        self.delivered = 0  # positions whose logits were handed out
        self.unfinished: set[int] = set()

    def add(self, window: int, tokens: Sequence[int], pairs: _Pairs, number: int) -> None:
        def take(start: int, logits: torch.Tensor) -> None:
            self.delivered += len(logits)
            pairs.take(number, window, start, logits)

        config = {"max_new_tokens": 0, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
        self.batcher.add_request(tokens, request_id=str(window), generation_config=config, on_prompt_logits=take)
        self.unfinished.add(window)

    def step(self) -> None:
        outputs = self.batcher.step()
        if not outputs:
            raise RuntimeError(f"{len(self.unfinished)} windows are unfinished and nothing advanced")
        for output in outputs:
            if output.finished:
                if output.error is not None:
                    raise output.error
                self.unfinished.discard(int(output.request_id))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)


def _open_sides(model, configs: Sequence[PagedCacheConfig], chunk_size: int, batch_size: int) -> list[_Side]:
    scheduler = {
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": chunk_size * batch_size,
        "chunked_prefill_size": chunk_size,
    }
    sides: list[_Side] = []
    try:
        for config in configs:
            batcher = ContinuousBatcher(model, cache_config=config, scheduler_config=scheduler)
            sides.append(_Side(batcher, config))
    except BaseException:
        for side in sides:
            side.batcher.close()
        raise
    return sides


class _Pairs:
    """Brings together what the sides say of the same positions."""

    def __init__(self, num_sides: int, on_chunk: OnChunk) -> None:
        self._num_sides, self._on_chunk = num_sides, on_chunk
        self._pending: dict[int, list[collections.deque]] = {}

    def take(self, side: int, window: int, start: int, logits: torch.Tensor) -> None:
        if self._num_sides == 1:
            self._on_chunk(window, start, (logits,))
            return
        sides = self._pending.setdefault(window, [collections.deque() for _ in range(self._num_sides)])
        sides[side].append((start, logits))
        while all(sides):
            count = min(len(part[0][1]) for part in sides)
            start = sides[0][0][0]
            if any(part[0][0] != start for part in sides):
                raise AssertionError(f"window {window}: sides begin at {[part[0][0] for part in sides]}")
            self._on_chunk(window, start, [part[0][1][:count] for part in sides])
            for part in sides:
                _, rest = part.popleft()
                if len(rest) > count:
                    part.appendleft((start + count, rest[count:]))
        if not any(sides):
            del self._pending[window]


def _run_packed(
    sides: Sequence[_Side], windows: Sequence[Sequence[int]], order: Sequence[int], pairs: _Pairs, batch_size: int
) -> None:
    waiting = collections.deque(order)
    running: list[int] = []
    while waiting or running:
        # Every side gets a window at the same moment, and only when all have room for the whole of it: so none has to
        # wait where another runs, and their steps stay the same.
        while waiting and len(running) < batch_size and _have_room(sides, windows, running, waiting[0]):
            window = waiting.popleft()
            running.append(window)
            for number, side in enumerate(sides):
                side.add(window, windows[window], pairs, number)
        # Whoever is behind; in lockstep that is each in turn.
        behind = [side for side in sides if side.unfinished]
        min(behind, key=lambda side: side.delivered).step()
        running = [window for window in running if any(window in side.unfinished for side in sides)]


def _have_room(sides: Sequence[_Side], windows: Sequence[Sequence[int]], running: Sequence[int], window: int) -> bool:
    if not running:
        return True  # alone it fits, or it would have been refused
    for side in sides:
        if side.config.num_blocks is not None:
            needed = sum(side.blocks(len(windows[one])) for one in (*running, window))
            if needed > side.config.num_blocks:
                return False
    return True


# Models that cannot be packed


def _run_alone(
    model, configs: Sequence[PagedCacheConfig], window: int, tokens: Sequence[int], on_chunk: OnChunk, chunk: int | None
) -> None:
    """One window over caches of its own; in one piece where `chunk` is None."""
    caches = [PagedCache(model.config, config) for config in configs]
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=device)
    chunk = chunk or len(tokens)
    with torch.no_grad():
        for start in range(0, len(tokens), chunk):
            piece = ids[:, start : start + chunk]
            logits = [model(piece, past_key_values=cache, use_cache=True).logits[0] for cache in caches]
            on_chunk(window, start, logits)


def _chunks_work(model) -> bool:
    """Whether a prompt in chunks gives the logits of the whole one; some recurrent layers begin anew with each."""
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = [3 + (37 * i + 11) % max(1, min(vocab, 512) - 3) for i in range(13)]
    tokens = [token % vocab for token in tokens]
    made: list[list[torch.Tensor]] = [[], []]
    for logits, chunk in zip(made, (None, 5), strict=True):
        try:
            _run_alone(model, [PagedCacheConfig()], 0, tokens, lambda _, __, got, to=logits: to.append(got[0]), chunk)
        except Exception:
            if chunk is None:
                raise
            return False
    whole, pieces = (torch.cat(logits).double() for logits in made)
    tolerance = 1e-3 if made[0][0].dtype in (torch.float32, torch.float64) else 0.1
    works = bool((whole - pieces).pow(2).mean().sqrt() <= tolerance * whole.std())
    if not works:
        warnings.warn(
            f"{type(model).__name__} gives other logits when a prompt comes in chunks: chunk_size is not used, each "
            "window is one forward",
            stacklevel=4,
        )
    return works
