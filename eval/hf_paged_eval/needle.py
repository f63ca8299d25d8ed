"""A fact hidden in a long text, asked for at its end: whether the cache still finds it.

Contract: for each length and depth one prompt of exactly so many tokens: text from the corpus, in it at that depth a
sentence with a number, at the end the beginning of the same sentence. The answer's tokens are scored through the cache
(teacher forcing), under both settings; "found" means that each of them was the most likely token. A weak model may
find few needles at all: compare with the reference, which reads the same prompts.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_paged import PagedCacheConfig

from .spans import score_spans

STATEMENT = " The secret number of {name} is {number}."
QUESTION = " The secret number of {name} is"
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo")


@dataclass(frozen=True)
class Needle:
    """One prompt's outcome; log-probabilities are of the whole answer, in nats."""

    length: int
    depth: float
    found: bool
    reference_found: bool
    logprob: float
    reference_logprob: float


@dataclass(frozen=True)
class NeedleResult:
    """All prompts' outcomes, and the share of needles that each setting found."""

    needles: list[Needle]

    @property
    def found(self) -> float:
        return sum(one.found for one in self.needles) / len(self.needles)

    @property
    def reference_found(self) -> float:
        return sum(one.reference_found for one in self.needles) / len(self.needles)

    def to_dict(self) -> dict:
        needles = [dataclasses.asdict(one) for one in self.needles]
        return {"found": self.found, "reference_found": self.reference_found, "needles": needles}


def needle_prompt(
    tokenizer, haystack: Sequence[int], length: int, depth: float, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Prompt and answer as token ids.

    Args:
        haystack: the text's tokens, at least `length` of them.
        length: tokens of the prompt.
        depth: where the statement stands: 0 at the beginning of the text, 1 right before the question.
    Raises:
        ValueError: the text is too short, or `length` leaves no room for statement and question.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, got {depth}")
    rng = random.Random(f"{length} {depth} {seed}")
    name, number = rng.choice(NAMES), str(rng.randint(10000, 99999))
    full = _ids(tokenizer, STATEMENT.format(name=name, number=number))
    question = _ids(tokenizer, QUESTION.format(name=name))
    answer = _ids(tokenizer, QUESTION.format(name=name) + " " + number)[len(question) :]
    room = length - len(full) - len(question)
    if room < 0:
        raise ValueError(f"a prompt of {length} tokens has no room for {len(full) + len(question)} of the needle")
    if len(haystack) < room:
        raise ValueError(f"a prompt of {length} tokens needs a text of {room}, got {len(haystack)}")
    at = round(room * depth)
    return [*haystack[:at], *full, *haystack[at:room], *question], answer


def needle_task(
    model,
    tokenizer,
    haystack: Sequence[int],
    *,
    cache_config: PagedCacheConfig | Mapping | None = None,
    reference: PagedCacheConfig | Mapping | None = None,
    lengths: Sequence[int] = (512, 2048),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    chunk_size: int = 64,
    batch_size: int = 4,
    seed: int = 0,
) -> NeedleResult:
    """Hide one number for each length and depth, and see which setting of the cache finds it.

    Raises:
        ValueError: no length or depth, or a prompt cannot be made.
    """
    cases = [(length, depth) for length in lengths for depth in depths]
    if not cases:
        raise ValueError("the needle task needs at least one length and one depth")
    made = [needle_prompt(tokenizer, haystack, length, depth, seed) for length, depth in cases]
    found = score_spans(model, made, (cache_config, reference), chunk_size=chunk_size, batch_size=batch_size)
    needles = [
        Needle(
            length,
            depth,
            found=bool(mine.best.all()),
            reference_found=bool(theirs.best.all()),
            logprob=float(mine.logprob.sum()),
            reference_logprob=float(theirs.logprob.sum()),
        )
        for (length, depth), (mine, theirs) in zip(cases, found, strict=True)
    ]
    return NeedleResult(needles)


def _ids(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
