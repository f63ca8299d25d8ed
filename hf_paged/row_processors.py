"""Logits processors that see a row's own tokens, as if its prompt had come alone.

Contract: in a padded batch transformers hands processors the padded rows, so penalties count the padding token, and
lengths count padding. Where a mask has padding, each prompt gets its own list of processors, made for its own length
and called with its own tokens; a user's processor is called once a prompt with `[copies of the prompt, tokens]`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

# These look at the scores alone, so a batch with padding is nothing to them.
WITHOUT_HISTORY = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper "
        "TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper LogitNormalization InfNanRemoveLogitsProcessor "
        "SuppressTokensLogitsProcessor"
    ).split()
    if hasattr(logits_process, name)
)


class RowProcessors(LogitsProcessor):
    """A list of processors for each prompt.

    Args:
        columns: for each prompt, the columns of `input_ids` that hold its own tokens.
        width: columns of the padded prompt; later ones hold new tokens.
        lists: for each prompt, its processors.
    """

    def __init__(self, columns: list[torch.Tensor], width: int, lists: list[LogitsProcessorList]) -> None:
        self.columns, self.width, self.lists = columns, width, lists

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        copies = input_ids.shape[0] // len(self.lists)
        new = torch.arange(self.width, input_ids.shape[1], device=input_ids.device)
        processed = []
        for index, processors in enumerate(self.lists):
            rows = slice(index * copies, (index + 1) * copies)
            own = input_ids[rows][:, torch.cat([self.columns[index].to(new.device), new])]
            processed.append(processors(own, scores[rows]))
        return torch.cat(processed)


def for_each_row(
    make: Callable[..., LogitsProcessorList], processors: LogitsProcessorList, arguments: dict, copies: int
) -> LogitsProcessorList:
    """The processors of a padded batch, each prompt with its own.

    Args:
        make: `_get_logits_processor` of the model, bound.
        processors: what it gave for the whole batch.
        arguments: what it was called with, by name.
        copies: rows of each prompt (beams, returned sequences).
    """
    mask = (arguments.get("model_kwargs") or {}).get("attention_mask")
    width = arguments.get("input_ids_seq_length")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] != width or bool((mask != 0).all()):
        return processors
    if all(isinstance(one, WITHOUT_HISTORY) for one in processors):
        return processors
    # Classifier-free guidance runs the model on the whole batch; it comes first in every list.
    whole_batch = [one for one in processors if isinstance(one, _GUIDANCE)]
    columns = [row.nonzero().flatten() for row in mask[::copies]]
    lists = [LogitsProcessorList(make(**_for_row(arguments, index, own))) for index, own in enumerate(columns)]
    return LogitsProcessorList([*whole_batch, RowProcessors(columns, width, lists)])


_GUIDANCE = logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor


def _for_row(arguments: dict, index: int, own: torch.Tensor) -> dict:
    """The arguments as they would be for one prompt alone."""
    config = copy.copy(arguments["generation_config"])
    length, width = len(own), arguments["input_ids_seq_length"]
    config.guidance_scale = None
    config.max_length -= width - length
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + length
    allowed = arguments.get("prefix_allowed_tokens_fn")
    encoder_ids = arguments.get("encoder_input_ids")
    if isinstance(encoder_ids, torch.Tensor) and encoder_ids.dim() == 2 and encoder_ids.shape[1] == width:
        encoder_ids = encoder_ids[index : index + 1, own.to(encoder_ids.device)]
    return {
        **arguments,
        "generation_config": config,
        "input_ids_seq_length": length,
        "encoder_input_ids": encoder_ids,
        "prefix_allowed_tokens_fn": allowed and (lambda _, tokens: allowed(index, tokens)),
        "model_kwargs": {},
    }
