"""The ways through the same requests inside this process: hf_paged and those of transformers.

Contract: an engine is prepared (untimed: what is made once and serves many requests), generates for a list of requests,
and is released. All decode greedily, give each request exactly its `max_new_tokens`, and run the model that they are
given, which they leave as it was. `settings` says what they ran with; each peer gets what its documentation advises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig

import hf_paged

from .workloads import Prompt

KV_GIB = 2.0  # room for keys and values, for the engines that want to know it before they start


class Engine:
    """One way through the requests."""

    name = ""
    settings: dict = {}

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Make what is not part of the measurement."""

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """New tokens of each request, in their order."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of what `prepare` made."""

    def close(self) -> None:
        """The end."""

    pid: int | None = None  # of another process that does the work


class Paged(Engine):
    """A ContinuousBatcher with its default settings, a new one for every run.

    A compiled one is kept, since compiling takes a minute, and what it has cached is dropped between runs.
    """

    name = "hf_paged"

    def __init__(self, model, compile: bool = False, **cache_config) -> None:
        self._model, self._cache_config, self._compile = model, cache_config, compile
        self._batcher: hf_paged.ContinuousBatcher | None = None
        self.settings = {"compile": compile, **cache_config}

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        if self._batcher is None:
            self._batcher = hf_paged.ContinuousBatcher(
                self._model, cache_config=self._cache_config, compile=self._compile
            )
        self._batcher.reset_prefix_cache()

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        configs = [forced(one.max_new_tokens) for one in prompts]
        outputs = self._batcher.generate([one.token_ids for one in prompts], configs)
        return [list(output.output_token_ids) for output in outputs]

    def release(self) -> None:
        if not self._compile:
            self.close()

    def close(self) -> None:
        if self._batcher is not None:
            self._batcher.close()
            self._batcher = None


class Padded(Engine):
    """transformers' generate over batches padded on the left; a batch lasts as long as its longest output.

    Args:
        batch_size: rows of a batch.
        sort: batches of requests with like output lengths, which only an oracle can know beforehand; else in the
            order of arrival.
    """

    def __init__(self, model, batch_size: int = 16, sort: bool = False) -> None:
        self._model, self._batch_size, self._sort = model, batch_size, sort
        self.name = "padded_sorted" if sort else "padded"
        self.settings = {"batch_size": batch_size, "attention": model.config._attn_implementation}

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        for batch in batches(prompts, self._batch_size, self._sort):
            rows = [prompts[index].token_ids for index in batch]
            new = max(prompts[index].max_new_tokens for index in batch)
            ids, mask = left_padded(rows, self._model.generation_config.pad_token_id, self._model.device)
            with torch.inference_mode():
                result = self._model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
            if result.shape[1] != ids.shape[1] + new:
                raise RuntimeError(f"generate gave {result.shape[1] - ids.shape[1]} tokens in place of {new}")
            for index, row in zip(batch, result[:, ids.shape[1] :].tolist(), strict=True):
                outputs[index] = row[: prompts[index].max_new_tokens]
        return outputs


class GenerateBatch(Engine):
    """transformers' continuous batching: the manager behind `generate_batch`, which takes one length for all requests.

    Args:
        page_size, max_batch_tokens, kv_gib: as its config names them; without a GPU it cannot tell how much memory
            there is, so the number of blocks is given.
    """

    name = "generate_batch"

    def __init__(self, model, page_size: int = 64, max_batch_tokens: int = 2048, kv_gib: float = KV_GIB) -> None:
        config = model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.dtype.itemsize
        self.settings = {"allow_block_sharing": True}
        if model.device.type == "cpu":  # on a GPU it finds the best values by itself
            self.settings |= {
                "page_size": page_size,
                "max_batch_tokens": max_batch_tokens,
                "num_blocks": max(8, int(kv_gib * 2**30 / (per_token * page_size))),
                "auto_switch_to_flash": False,
            }
        self._model = model

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        known, settings = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}, dict(self.settings)
        if "page_size" in settings and "page_size" not in known:  # transformers 5.17 has another name for it
            settings["block_size"] = settings.pop("page_size")
        if "auto_switch_to_flash" not in known:  # nor this one
            settings.pop("auto_switch_to_flash", None)
        longest = max(one.max_new_tokens for one in prompts)
        generation = GenerationConfig(
            do_sample=False,
            max_new_tokens=longest,
            eos_token_id=-1,
            pad_token_id=self._model.generation_config.pad_token_id,
        )
        hints = WorkloadHints(
            max_prompt_length=max(len(one.token_ids) for one in prompts),
            max_generated_length=longest,
            num_requests=len(prompts),
        )
        self._attention = self._model.config._attn_implementation
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_transformers())
            stack.callback(self._restore)
            self._manager = stack.enter_context(
                self._model.continuous_batching_context_manager(
                    generation_config=generation,
                    continuous_batching_config=ContinuousBatchingConfig(**settings),
                    workload_hints=hints,
                    timeout=60,
                )
            )
            self._stack = stack.pop_all()

    def _restore(self) -> None:
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        manager, outputs = self._manager, {}
        for index, one in enumerate(prompts):
            manager.add_request(
                one.token_ids, request_id=f"r{index}", max_new_tokens=one.max_new_tokens, eos_token_id=-1
            )
        while len(outputs) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before its requests ended")
            elif result.error:
                raise RuntimeError(f"transformers' continuous batching: {result.error}")
            elif result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[f"r{index}"] for index in range(len(prompts))]

    def release(self) -> None:
        self._manager = None
        self._stack.close()


def forced(new: int) -> dict:
    """A generation config for exactly so many tokens, greedily."""
    return {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}


def batches(prompts: Sequence[Prompt], size: int, sort: bool = False) -> list[list[int]]:
    """Requests by their place, in groups of `size`: in the order of arrival, or sorted by the length of the output."""
    order = list(range(len(prompts)))
    if sort:
        order.sort(key=lambda index: (prompts[index].max_new_tokens, len(prompts[index].token_ids)))
    return [order[start : start + size] for start in range(0, len(order), size)]


def left_padded(rows: Sequence[Sequence[int]], pad: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask`, both [rows, longest] int64."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the warnings that transformers' continuous batching gives on every run."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
