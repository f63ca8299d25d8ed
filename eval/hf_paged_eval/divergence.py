"""From logits to what is kept of them: log-probabilities of tokens, and how far two distributions lie apart.

Contract: `compare` reads a chunk's logits once, a few rows at a time, so that its temporaries stay small however large
the vocabulary is, and changes none of them. Equal logits give a KL divergence of exactly 0. float64 logits are
computed in float64, all others in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_ELEMENTS = 1 << 20  # of a temporary on a CPU
_ELEMENTS_DEVICE = 1 << 26


class Compared(NamedTuple):
    """Of each row of logits; arrays `[rows]`. The last three are None without a reference.

    logprob, reference_logprob: of the target token, nats, float64.
    best: whether no token is more likely than the target.
    kl: KL(reference || candidate), nats, float64.
    agrees: whether no token is more likely to the candidate than the one that the reference finds most likely.
    """

    logprob: np.ndarray
    best: np.ndarray
    reference_logprob: np.ndarray | None = None
    kl: np.ndarray | None = None
    agrees: np.ndarray | None = None


def compare(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None = None) -> Compared:
    """Score the targets.

    Args:
        logits: `[rows, vocab]` of the candidate.
        targets: `[rows]` int64, the token that came next; anywhere.
        reference: `[rows, vocab]` of the reference, or None.
    """
    targets = targets.to(logits.device)
    elements = _ELEMENTS if logits.device.type == "cpu" else _ELEMENTS_DEVICE
    rows = max(1, elements // logits.shape[1])
    parts = []
    with torch.no_grad():
        for at in range(0, len(logits), rows):
            part = slice(at, at + rows)
            other = None if reference is None else reference[part].to(logits.device)
            parts.append(_compare(logits[part], targets[part, None], other))
        columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return Compared(*columns)


def _compare(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    mine = _Row(logits)
    best = mine.below.gather(1, targets)[:, 0] == 0
    if reference is None:
        return mine.logprob(targets), best
    theirs = _Row(reference)
    agrees = mine.below.gather(1, theirs.below.argmax(dim=-1, keepdim=True))[:, 0] == 0
    logprob, reference_logprob = mine.logprob(targets), theirs.logprob(targets)
    gap = theirs.below.sub_(mine.below)
    # sum of p * (log p - log q), where log p = below - log(sum of powers).
    kl = torch.linalg.vecdot(theirs.powers, gap).double() / theirs.sum - (theirs.sum.log() - mine.sum.log())
    strange = ~kl.isfinite()
    if bool(strange.any()):  # a token without any probability: 0 * log(0 / 0) counts as 0
        powers = theirs.powers[strange].double()
        terms = torch.where(powers == 0, 0.0, powers * gap[strange].double())
        kl[strange] = terms.sum(dim=-1) / theirs.sum[strange] - (theirs.sum.log() - mine.sum.log())[strange]
    # Rounding can leave less than nothing of a divergence; NaN stays.
    return logprob, best, reference_logprob, kl.clamp_(min=0), agrees


class _Row:
    """Some rows of logits, made ready.

    `torch.log_softmax` adds its float32 terms one after another, which leaves errors of 1e-5 nats over a vocabulary of
    50,000, all of one sign. `torch.sum` adds in a tree: 1e-7.

    Attributes:
        below: the logits less their row's largest, `[rows, vocab]`; the most likely tokens have 0.
        powers: exp of them.
        sum: their sum, `[rows]` float64.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        if logits.dtype != torch.float64:
            logits = logits.float()
        self.below = logits - logits.amax(dim=-1, keepdim=True)
        self.powers = self.below.exp()
        self.sum = self.powers.sum(dim=-1).double()

    def logprob(self, targets: torch.Tensor) -> torch.Tensor:
        return self.below.gather(1, targets)[:, 0].double() - self.sum.log()
