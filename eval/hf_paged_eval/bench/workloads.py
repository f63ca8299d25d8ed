"""The requests that the benches run: named, seeded, of real English token ids.

Contract: `workload(name, english_ids(tokenizer))` gives the same for the same tokenizer, seed and version of Python,
whose own help texts the prompts are cut from: no network, no files. No two prompts of a workload come from overlapping
places of the text, so only `shared_prefix` has a prefix in common (a phrase that the text repeats aside). Lengths are
forced: a request ends with its `max_new_tokens`, whatever the model would have said.

| name | requests | prompt tokens | new tokens |
|---|---|---|---|
| mixed | 64 | lognormal, 32 to 512 | lognormal with a heavy tail, 16 to 256 |
| shared_prefix | 64 | 512 in common and 32 of their own | 64 |
| decode | 32 | 32 | 128 |
| long | 4 | 4,096 | 64 |
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Prompt(NamedTuple):
    """One request: the tokens it brings and how many it gets."""

    token_ids: list[int]
    max_new_tokens: int

    @property
    def total(self) -> int:
        return len(self.token_ids) + self.max_new_tokens


class Lognormal(NamedTuple):
    """A length whose logarithm is normal, cut off at both ends."""

    least: int
    most: int
    median: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(self.least, round(math.exp(rng.gauss(math.log(self.median), self.sigma)))))


class Spec(NamedTuple):
    """How a workload is made; `prefix` tokens are common to all of its prompts, before those of `prompt`."""

    requests: int
    prompt: int | Lognormal
    new: int | Lognormal
    prefix: int = 0


SPECS = {
    "mixed": Spec(64, Lognormal(32, 512, 110, 0.8), Lognormal(16, 256, 40, 1.0)),
    "shared_prefix": Spec(64, 32, 64, prefix=512),
    "decode": Spec(32, 32, 128),
    "long": Spec(4, 4096, 64),
}
QUICK_SPECS = {
    "mixed": Spec(6, Lognormal(8, 64, 24, 0.8), Lognormal(4, 24, 8, 1.0)),
    "shared_prefix": Spec(6, 8, 6, prefix=64),
    "decode": Spec(4, 16, 12),
    "long": Spec(2, 256, 6),
}


@dataclass(frozen=True)
class Workload:
    """Requests under a name."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.prompts)

    @property
    def new_tokens(self) -> int:
        return sum(one.max_new_tokens for one in self.prompts)

    @property
    def longest_prompt(self) -> int:
        return max(len(one.token_ids) for one in self.prompts)

    @property
    def longest_output(self) -> int:
        return max(one.max_new_tokens for one in self.prompts)

    @property
    def mean_tokens(self) -> float:
        """Tokens that a request stores, on average over its life and over all requests."""
        steps = sum(one.max_new_tokens * (len(one.token_ids) + one.max_new_tokens / 2) for one in self.prompts)
        return steps / self.new_tokens

    def json_lines(self) -> str:
        """A line for each request, as engines in other processes read them."""
        return "".join(
            json.dumps({"prompt_token_ids": one.token_ids, "max_new_tokens": one.max_new_tokens}) + "\n"
            for one in self.prompts
        )

    def summary(self) -> dict:
        """What a result says of the requests that it is about."""
        return {
            "name": self.name,
            "requests": len(self.prompts),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "longest_prompt": self.longest_prompt,
            "longest_output": self.longest_output,
            "sha256": hashlib.sha256(self.json_lines().encode()).hexdigest()[:16],
        }


def english_ids(tokenizer) -> list[int]:
    """Token ids of the help texts that Python brings along (some hundred thousand)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # without the warning that the text is longer than any context
        return backend.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def workload(name: str, ids: Sequence[int], seed: int = 0, quick: bool = False) -> Workload:
    """The requests of one name.

    Args:
        name: one of SPECS.
        ids: the text that prompts are cut from, `english_ids(tokenizer)`.
        seed: other lengths and places for each seed.
        quick: the small version.
    Raises:
        ValueError: there is no such workload, or the text is too short for it.
    """
    if name not in SPECS:
        raise ValueError(f"workload must be one of {', '.join(SPECS)}, got {name!r}")
    spec = (QUICK_SPECS if quick else SPECS)[name]
    rng = random.Random(f"{name} {seed}")
    lengths = [(_length(spec.prompt, rng), _length(spec.new, rng)) for _ in range(spec.requests)]
    prefix, *own = _cut(ids, [spec.prefix, *(prompt for prompt, _ in lengths)], rng, name)
    prompts = tuple(Prompt(prefix + piece, new) for piece, (_, new) in zip(own, lengths, strict=True))
    return Workload(name, prompts)


def _length(rule: int | Lognormal, rng: random.Random) -> int:
    return rule if isinstance(rule, int) else rule.draw(rng)


def _cut(ids: Sequence[int], lengths: list[int], rng: random.Random, name: str) -> list[list[int]]:
    """Pieces of these lengths from places of the text that do not overlap, in random order."""
    spare = len(ids) - sum(lengths)
    if spare < 0:
        raise ValueError(f"workload {name!r} needs a text of {sum(lengths)} tokens, got {len(ids)}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    gaps = sorted(rng.randint(0, spare) for _ in lengths)
    pieces: list[list[int]] = [[] for _ in lengths]
    taken = 0
    for gap, index in zip(gaps, order, strict=True):
        pieces[index] = list(ids[gap + taken : gap + taken + lengths[index]])
        taken += lengths[index]
    return pieces
