"""Prompts whose mask has holes or padding on the right, moved together for the time of a `generate` call.

Contract: a decoder-only model continues a row after its last column, so a row's real tokens must stand at the
end. `Compaction` moves them there, in order, and puts the caller's own columns back into the result. Columns that
a cache holds already stay as they were moved when they were written; prompts that are padded on the left alone are
not touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Arguments with one entry a column of the prompt, and those with columns of their own.
_BY_COLUMN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_BY_ITSELF = ("negative_prompt_ids", "negative_prompt_attention_mask", "pixel_values", "eos_token_id")


class Compaction:
    """How the columns of one prompt batch were moved.

    Args:
        order: `[batch, columns]` int64, which column of the caller's each column is now; None for no move.
        prompt: the caller's own `input_ids`, `[batch, columns or fewer]`; None where embeddings stand for them.
    """

    def __init__(self, order: torch.Tensor | None = None, prompt: torch.Tensor | None = None) -> None:
        self.order, self.prompt = order, prompt

    @classmethod
    def of(cls, prompt, kwargs: Mapping, past: int = 0, past_order: torch.Tensor | None = None) -> Compaction:
        """What must move for a decoder-only call.

        Args:
            prompt: the call's `input_ids`, or None.
            kwargs: its other arguments.
            past: columns that its cache holds.
            past_order: how those were moved, or None.
        Raises:
            ValueError: a row of the attention mask has no real token.
            NotImplementedError: an argument cannot be moved along.
        """
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return (
                cls() if past_order is None or prompt is None else cls(continued(past_order, prompt.shape[1]), prompt)
            )
        real = mask.bool()
        empty = (~real.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"row {empty[0]} of attention_mask has no real token: an empty prompt has nothing to continue; "
                "leave the row out or give it a first token (bos)"
            )
        new = real[:, past:]
        padding = (~new).sum(dim=1, keepdim=True)
        left_only = torch.equal(new, torch.arange(new.shape[1], device=new.device)[None] >= padding)
        if left_only and past_order is None:
            return cls()
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise NotImplementedError(
                    f"{name}=True with a mask that has holes or padding on the right; pad on the left"
                )
        none_moved = torch.empty((mask.shape[0], 0), dtype=torch.int64, device=mask.device)
        order = continued(none_moved if past_order is None else past_order.to(mask.device), mask.shape[1])
        # A stable sort keeps padding and real tokens each in their order, padding first.
        order[:, past:] = past + torch.sort(new.int(), dim=1, stable=True).indices
        return cls(order, prompt)

    def apply(self, inputs, kwargs: dict) -> tuple:
        """The call's arguments with every tensor of one entry a column moved."""
        if self.order is None:
            return inputs, kwargs
        if inputs is not None:
            inputs = self._move(inputs)
        columns = self.order.shape[1]
        moved = {}
        for name, value in kwargs.items():
            if name in _BY_COLUMN and isinstance(value, torch.Tensor):
                value = self._move(value)
            elif isinstance(value, torch.Tensor) and name not in _BY_ITSELF and columns in value.shape[1:]:
                raise NotImplementedError(
                    f"{name} {tuple(value.shape)} with a mask that has holes or right padding; pad on the left"
                )
            moved[name] = value
        if moved.get("streamer") is not None and self.prompt is not None:
            moved["streamer"] = _PromptStreamer(moved["streamer"], self.prompt)
        return inputs, moved

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        skipped = self.order.shape[1] - tensor.shape[1]  # input_ids of the new tokens alone
        order = self.order[:, skipped:].to(tensor.device) - skipped
        if tensor.dim() == 3:  # inputs_embeds
            order = order[..., None].expand(*order.shape, tensor.shape[2])
        return tensor.gather(1, order)

    def undo(self, result):
        """The result of `generate` with the caller's own prompt columns."""
        if self.order is None or self.prompt is None:
            return result
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        copies = sequences.shape[0] // self.prompt.shape[0]
        prompt = self.prompt.to(sequences.device).repeat_interleave(copies, dim=0)
        sequences[:, : prompt.shape[1]] = prompt
        return result


def continued(order: torch.Tensor, columns: int) -> torch.Tensor:
    """`order [batch, n]` cut or continued to `columns`, later columns in their own places."""
    rest = torch.arange(order.shape[1], columns, device=order.device).expand(order.shape[0], -1)
    return torch.cat([order, rest], dim=1)[:, :columns]


class _PromptStreamer:
    """Shows a streamer the caller's own prompt instead of the moved one."""

    def __init__(self, streamer, prompt: torch.Tensor) -> None:
        self._streamer, self._prompt = streamer, prompt

    def put(self, value) -> None:
        prompt, self._prompt = self._prompt, None
        self._streamer.put(value if prompt is None else prompt.cpu())

    def end(self) -> None:
        self._streamer.end()
