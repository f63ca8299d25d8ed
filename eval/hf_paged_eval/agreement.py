"""Whether greedy text stays the same under another cache setting, and for how long.

Contract: every prompt is continued greedily under both settings of the same model, by the batcher (or, where the model
cannot be packed, by `generate` alone), with the same number of new tokens and without an early end, so that all
prompts count alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_paged import ContinuousBatcher, PackingError, PagedCacheConfig


@dataclass(frozen=True)
class Agreement:
    """How two settings' greedy texts compare.

    Attributes:
        num_prompts, max_new_tokens: what was run.
        identical: share of prompts whose whole text is the same.
        prefix: mean share of the new tokens before the first difference.
        first_difference: for each prompt the new token (from 0) that differs first; None where none does.
        token_ids, reference_token_ids: the texts.
    """

    num_prompts: int
    max_new_tokens: int
    identical: float
    prefix: float
    first_difference: list[int | None]
    token_ids: list[list[int]]
    reference_token_ids: list[list[int]]

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def greedy_agreement(
    model,
    prompts: Sequence[Sequence[int]],
    *,
    cache_config: PagedCacheConfig | Mapping | None = None,
    reference: PagedCacheConfig | Mapping | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
) -> Agreement:
    """Generate under both settings and compare, token for token.

    Args:
        prompts: token ids; one at least.
        cache_config, reference: the two settings; None is the default, the model's own dtype.
        batch_size: prompts at the same time.
    Raises:
        ValueError: there is no prompt, or a setting is wrong.
    """
    if not len(prompts):
        raise ValueError("greedy agreement needs at least one prompt")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    mine, theirs = (greedy(model, prompts, config, max_new_tokens, batch_size) for config in (cache_config, reference))
    first: list[int | None] = []
    for one, other in zip(mine, theirs, strict=True):
        pairs = enumerate(zip(one, other, strict=True))
        first.append(next((at for at, (a, b) in pairs if a != b), None))
    shares = [1.0 if at is None else at / max_new_tokens for at in first]
    return Agreement(
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        identical=first.count(None) / len(first),
        prefix=sum(shares) / len(shares),
        first_difference=first,
        token_ids=mine,
        reference_token_ids=theirs,
    )


def greedy(model, prompts, cache_config, max_new_tokens: int, batch_size: int = 8) -> list[list[int]]:
    """`max_new_tokens` greedy tokens for each prompt, end-of-sequence tokens ignored."""
    config = dataclasses.replace(PagedCacheConfig.from_any(cache_config), enable_prefix_caching=False)
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    try:
        batcher = ContinuousBatcher(model, cache_config=config, scheduler_config={"max_num_seqs": batch_size})
    except PackingError:
        device, texts = model.get_input_embeddings().weight.device, []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache_implementation="paged",
                cache_config=config.to_dict(),
                **settings,
            )
            texts.append(out[0, ids.shape[1] :].tolist())
        return texts
    with batcher:
        return [list(output.output_token_ids) for output in batcher.generate(prompts, settings)]
