"""From what a caller hands over to requests: prompts of any form, checked arguments.

Contract: everything that can be wrong with one request is found here, before it touches the others: ValueError with
the value and the bound, NotImplementedError by name. Nothing here changes the batcher.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from transformers import GenerationConfig

from .adapters import check_adapter
from .config import SchedulerConfig
from .packing import PackingPlan
from .request import Request
from .sampling import SamplingTemplate
from .scheduler import Scheduler

_MAX_TEMPLATES = 64  # completing a generation config takes transformers longer than all else about a request


class Intake:
    """Makes the requests of one batcher.

    Args:
        model, tokenizer: as the batcher has them.
        plan: what is known of the model.
        scheduler: which requests fit.
        generation_config: of requests that bring none.
    """

    def __init__(self, model, tokenizer, plan: PackingPlan, scheduler: Scheduler, generation_config) -> None:
        self.model, self.tokenizer, self.plan, self.scheduler = model, tokenizer, plan, scheduler
        self.config: SchedulerConfig = scheduler.config
        self.generation_config = generation_config
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self._templates: dict[tuple[str, str], SamplingTemplate] = {}
        self._keys = itertools.count()
        self._names = itertools.count()
        self._lock = threading.Lock()  # transformers keeps a cache of stop strings that is not made for threads

    def template(self, generation_config=None) -> SamplingTemplate:
        """A generation config made complete, to be used for several prompts."""
        if isinstance(generation_config, SamplingTemplate):
            return generation_config
        chosen = self.generation_config if generation_config is None else generation_config
        # By what it says, not by which object it is: the caller may change it between two requests.
        key = (_shown(chosen), _shown(self.model.generation_config))
        template = self._templates.get(key)
        if template is None:
            template = SamplingTemplate(self.model, chosen, self.tokenizer)
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[key] = template
        return template

    def release(self) -> None:
        """Let go of the model."""
        self.model = self.scheduler = None
        self._templates.clear()

    def new_id(self) -> str:
        return f"request-{next(self._names)}"

    def requests(
        self,
        prompt,
        *,
        request_id: str,
        generation_config=None,
        logits_processor=None,
        stopping_criteria=None,
        streamer=None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_name: str | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        on_prompt_logits: Callable | None = None,
    ) -> list[Request]:
        """The samples of one prompt; the first one carries the others."""
        if adapter_name is not None:
            check_adapter(self.model, adapter_name)
        _check_int("priority", priority)
        if priority and self.config.policy != "priority":
            raise ValueError(
                f"priority={priority} needs SchedulerConfig(policy='priority'), the policy is {self.config.policy!r}"
            )
        if seed is not None:
            _check_int("seed", seed, 0)
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None:
                _check_int(name, count, 0, self.vocab_size)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a string, got {cache_salt!r}")
        tokens = self.token_ids(prompt)
        made: list[Request] = []
        with self._lock:
            template = self.template(generation_config)
            count = template.num_return_sequences
            if count > 1 and streamer is not None:
                raise ValueError(f"a streamer takes one text, num_return_sequences is {count}")
            for index in range(count):
                sampling = template.for_prompt(tokens, self.plan.input_device, logits_processor, stopping_criteria)
                if index == 0:
                    self._check_length(len(tokens), sampling.max_tokens)
                # A sample's own stream of random numbers, the same whatever runs beside it.
                sampling.seed(None if seed is None else seed + index, self.plan.input_device)
                sampling.report_logprobs(logprobs)
                if index == 0:
                    sampling.num_prompt_logprobs, sampling.on_prompt_logits = prompt_logprobs, on_prompt_logits
                made.append(self._request(request_id, tokens, index, sampling, priority, cache_salt, adapter_name))
        first = made[0]
        first.samples, first.streamer = made[1:], streamer
        for one in made:
            one.prompt_logprobs = None if prompt_logprobs is None else ([] if one is first else first.prompt_logprobs)
        return made

    def _request(self, request_id, tokens, index, sampling, priority, cache_salt, adapter_name) -> Request:
        request = Request(
            request_id,
            tokens,
            key=next(self._keys),
            max_tokens=sampling.max_tokens,
            eos_token_ids=sampling.eos_token_ids,
            priority=priority,
            index=index,
            sampling=sampling,
            checks_stop=len(sampling.criteria) > 0,
            cache_salt=cache_salt,
            adapter_name=adapter_name,
        )
        request.wants_prompt_logits = sampling.wants_prompt_logits
        request.is_plain = sampling.is_plain_greedy
        request.logprobs = None if sampling.num_logprobs is None else []
        request.scores = [] if sampling.keeps_scores else None
        request.logits = [] if sampling.keeps_logits else None
        if self.tokenizer is not None:
            request.decode = self._decode
        return request

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _check_length(self, length: int, max_tokens: int) -> None:
        stored = max(length, max_tokens - 1)  # the last token is never computed
        plan = self.plan
        if plan.max_position is not None and stored > plan.max_position:
            raise ValueError(
                f"a prompt of {length} tokens and up to {max_tokens - length} new ones need {stored} positions, "
                f"{type(self.model).__name__} has embeddings for {plan.max_position}"
            )
        if plan.position_limit is not None and stored > plan.position_limit:
            raise ValueError(
                f"a prompt of {length} tokens and up to {max_tokens - length} new ones need {stored} positions; "
                f"beyond {plan.position_limit} {type(self.model).__name__} would change the positions of every "
                "sequence in the batch: use model.generate(..., cache_implementation='paged')"
            )
        self.scheduler.check_fits(length, max_tokens)

    def token_ids(self, prompt) -> list[int]:
        """The tokens of a prompt: ids, a tensor, a text, or a chat.

        Raises:
            ValueError: it is empty, holds what is no token id, or is a text and there is no tokenizer.
        """
        if isinstance(prompt, str) or (_is_chat(prompt)):
            if self.tokenizer is None:
                raise ValueError("a text or a chat as a prompt needs a tokenizer: give the batcher one (tokenizer=...)")
            return self.token_ids(self._encode(prompt))
        if isinstance(prompt, Mapping):
            raise ValueError("a prompt must be token ids, a text or a chat, got a mapping; pass its input_ids")
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.detach().cpu().numpy()
        array = np.asarray(prompt)
        if array.ndim == 2 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 1:
            raise ValueError(f"a prompt must be one sequence of token ids, got shape {list(array.shape)}")
        if array.size == 0:
            raise ValueError("an empty prompt has nothing to continue: give it a first token (bos)")
        if array.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, got {array.dtype}: {array[:4].tolist()}")
        bad = array[(array < 0) | (array >= self.vocab_size)]
        if bad.size:
            raise ValueError(f"token id {int(bad[0])} is out of range, the model has {self.vocab_size} tokens")
        return array.tolist()

    def _encode(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _shown(config) -> str:
    return repr(vars(config) if isinstance(config, GenerationConfig) else config)


def _is_chat(prompt) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _check_int(name: str, value, lowest: int | None = None, highest: int | None = None) -> None:
    low, high = lowest is not None, highest is not None
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or (low and value < lowest) or (high and value > highest):
        bound = f" from {lowest}" if low else ""
        bound += f" to {highest}" if high else ""
        raise ValueError(f"{name} must be an integer{bound}, got {value!r}")
