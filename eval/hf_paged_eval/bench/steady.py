"""Steps of steady decode at a chosen batch and context.

Contract: `Steady` keeps one batcher. `at(batch, context, steps)` brings so many requests, each with text of its own, to
where one token more makes `context`, and gives the seconds of the steps that follow: each computes one token of each
request, and the last one attends to `context` tokens of each (some more where prompts end in several steps). Prompts
at one context begin those at a larger one, so that prefix caching spares computing them again; no two requests share
a block.
"""

from __future__ import annotations

import random

import hf_paged

from .engines import forced
from .machine import seconds_of

SLACK = 24  # tokens for requests whose prompt is done some steps before that of others


class Steady:
    """Requests that decode, of one model.

    Args:
        model: the model.
        max_batch: the largest batch that will be asked for.
        compile: as ContinuousBatcher takes it.
        cache_config: of the batcher.
    """

    def __init__(self, model, max_batch: int = 256, compile: bool = False, **cache_config) -> None:
        self._model = model
        self.batcher = hf_paged.ContinuousBatcher(
            model, cache_config=cache_config, scheduler_config={"max_num_seqs": max_batch}, compile=compile
        )
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._texts: list[list[int]] = []

    def __enter__(self) -> Steady:
        return self

    def __exit__(self, *exception) -> None:
        self.batcher.close()

    def at(self, batch: int, context: int, steps: int) -> list[float]:
        """Wall seconds of `steps` steps.

        Raises:
            ValueError: the context has no room for a prompt before the steps.
        """
        with self.running(batch, context, steps):
            return [seconds_of(self.batcher.step, self._model.device) for _ in range(steps)]

    def running(self, batch: int, context: int, steps: int) -> Running:
        """A context in which `batch` requests decode; `batcher.step()` is then theirs, at least `steps` times."""
        return Running(self, batch, context, steps)

    def prompt(self, row: int, length: int) -> list[int]:
        while len(self._texts) <= row:
            self._texts.append([])
        text = self._texts[row]
        if len(text) < length:
            rng = random.Random(f"steady {row} {len(text)}")
            text += [rng.randrange(3, self._vocabulary) for _ in range(length - len(text))]
        return text[:length]


class Running:
    """Some requests of a Steady, between their prefill and their end."""

    def __init__(self, steady: Steady, batch: int, context: int, steps: int) -> None:
        # The step that ends a prompt gives the first token; each further one attends to one token more.
        self._length = context - steps
        if self._length < 1:
            raise ValueError(f"a context of {context} tokens has no room for {steps} steps and a prompt")
        self._steady, self._batch, self._steps, self._names = steady, batch, steps, []

    def __enter__(self) -> Running:
        batcher = self._steady.batcher
        prompts = [self._steady.prompt(row, self._length) for row in range(self._batch)]
        # Once for the blocks, so that all prompts, found there up to their last block, then end in the same step or so.
        batcher.generate(prompts, forced(1))
        for prompt in prompts:
            self._names.append(batcher.add_request(prompt, generation_config=forced(self._steps + SLACK)))
        decoding: set[str] = set()
        while len(decoding) < self._batch:
            # A step also tells of requests that were aborted before it.
            outputs = [output for output in batcher.step() if output.request_id in self._names]
            if any(output.finished for output in outputs):
                raise RuntimeError(
                    f"a request ended before all {self._batch} decoded: more than {SLACK} steps of prompts"
                )
            decoding |= {output.request_id for output in outputs if output.output_token_ids}
        return self

    def __exit__(self, *exception) -> None:
        for name in self._names:
            self._steady.batcher.abort(name)
