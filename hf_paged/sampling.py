"""What one request asks for, as transformers would understand it.

Contract: a `SamplingTemplate` is a GenerationConfig made complete and checked, the way `generate` does it (the
request's values, then the model's, then transformers' defaults); `for_prompt` makes of it the logits processors,
stopping criteria and lengths of one request, by the model's own methods. What a batcher cannot do is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .row_processors import WITHOUT_HISTORY

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class SamplingTemplate:
    """A complete GenerationConfig, checked once for all prompts that use it.

    Args:
        model: whose defaults and methods count.
        generation_config: a GenerationConfig, a dict of its fields, or None.
        tokenizer: for stop strings; may be None.
    Raises:
        ValueError: a value is wrong.
        NotImplementedError: it asks for what a batcher cannot do.
    """

    def __init__(self, model, generation_config: GenerationConfig | Mapping | None, tokenizer=None) -> None:
        self.model, self.tokenizer = model, tokenizer
        given = _as_config(generation_config)
        self._has_default_max_length = _is_none("max_length", given, model)
        self._has_default_min_length = _is_none("min_length", given, model)
        config = copy.deepcopy(given) if given is not None else None
        # transformers refuses both of these, and they mean something here.
        samples = _value("num_return_sequences", config, model)
        self.num_return_sequences = 1 if samples is None else samples
        self._no_new_tokens = _value("max_new_tokens", config, model) == 0
        if config is not None:
            config.num_return_sequences = 1
            config.max_new_tokens = 1 if self._no_new_tokens else config.max_new_tokens
        count = self.num_return_sequences
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"num_return_sequences must be an integer >= 1, got {count!r}")
        self.config, _ = model._prepare_generation_config(config)
        self.config.num_return_sequences = 1
        self._refuse(given)

    def _refuse(self, given: GenerationConfig | None) -> None:
        config = self.config
        mode = config.get_generation_mode()
        if mode not in _MODES:
            raise NotImplementedError(
                f"the generation config asks for {mode.value}, a batcher does greedy search and sampling; use "
                "model.generate(..., cache_implementation='paged')"
            )
        if given is not None and given.use_cache is False:
            raise ValueError("generation_config has use_cache=False, a batcher always keeps the KV cache in blocks")
        for name in ("output_attentions", "output_hidden_states", "token_healing"):
            if getattr(config, name, None):
                raise NotImplementedError(f"{name}=True is not supported by a batcher; use model.generate")
        kind = getattr(given, "cache_implementation", None)
        if kind not in (None, "paged", "dynamic"):
            raise ValueError(f"cache_implementation={kind!r} in generation_config: a batcher's cache is always paged")
        if config.stop_strings is not None and self.tokenizer is None:
            raise ValueError(
                f"stop_strings={config.stop_strings!r} need a tokenizer: give the batcher one (tokenizer=...)"
            )

    def for_prompt(
        self,
        prompt: Sequence[int],
        device: torch.device,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
    ) -> Sampling:
        """Processors, criteria and lengths for one prompt.

        Raises:
            ValueError: the prompt is as long as `max_length`.
        """
        model, config = self.model, copy.copy(self.config)
        length, criteria = len(prompt), list(stopping_criteria or ())
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        config = model._prepare_generated_length(
            generation_config=config,
            has_default_max_length=self._has_default_max_length,
            has_default_min_length=self._has_default_min_length,
            model_input_name="input_ids",
            input_ids_length=length,
            inputs_tensor=None,
        )
        if self._no_new_tokens:
            config.max_length = length
        elif length >= config.max_length:
            raise ValueError(
                f"the prompt has {length} tokens and max_length is {config.max_length}; raise max_length, or set "
                "max_new_tokens"
            )
        ids = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=length,
            encoder_input_ids=ids,
            logits_processor=LogitsProcessorList(logits_processor or ()),
            device=device,
            model_kwargs={},
        )
        eos = config._eos_token_tensor
        eos_token_ids = tuple(eos.tolist()) if eos is not None else ()
        max_tokens = config.max_length
        # A criterion of the caller takes the place of transformers' own of that type.
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria and not self._no_new_tokens:
                max_tokens = max(criterion.max_length, length + 1)  # asked after a token, never before
            elif type(criterion) is EosTokenCriteria:
                eos_token_ids = tuple(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        criteria = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        others = copy.copy(config)
        others.max_length = others._eos_token_tensor = None
        stopping = model._get_stopping_criteria(others, StoppingCriteriaList(criteria), tokenizer=self.tokenizer)
        return Sampling(config, processors, stopping, eos_token_ids, max_tokens)


class Sampling:
    """How the tokens of one request are chosen. Shared by the samples of a prompt, until `copy_for`.

    Attributes:
        processors: applied to the scores of each step, in order.
        criteria: stopping criteria beyond length and end-of-sequence tokens.
        eos_token_ids, max_tokens: what ends the request besides.
        do_sample: draw from the distribution instead of taking the best.
        batch_key: requests with an equal one can be processed in one call; None where the history matters.
        generator: the request's own random generator; None for the global one.
        noise, row: where its random numbers come from instead, and which of them are its own (see `batched.LoopNoise`).
        keeps_scores, keeps_logits: whether each step's are kept.
        is_plain_greedy: whether the best logit is all there is to it.
        num_logprobs, num_prompt_logprobs: how many of the most likely tokens to report; None for no report.
        on_prompt_logits: called with the prompt's logits.
        prompt_logits_done: prompt positions whose logits have been handed out.
    """

    def __init__(self, config, processors, criteria, eos_token_ids, max_tokens) -> None:
        self.config, self.processors, self.criteria = config, processors, criteria
        self.eos_token_ids, self.max_tokens = eos_token_ids, max_tokens
        self.do_sample = bool(config.do_sample)
        self.batch_key = _batch_key(processors)
        told = bool(config.return_dict_in_generate)
        self.keeps_scores, self.keeps_logits = told and bool(config.output_scores), told and bool(config.output_logits)
        self.generator: torch.Generator | None = None
        self.noise, self.row = None, 0
        self.num_logprobs: int | None = None
        # Whether the best logit is all there is to it; asked for every request in every step.
        self.is_plain_greedy = not (self.do_sample or processors or self.keeps_scores or self.keeps_logits)
        self.num_prompt_logprobs: int | None = None
        self.on_prompt_logits: Callable | None = None
        self.prompt_logits_done = 0
        self._history: torch.Tensor | None = None
        self._known = 0

    @property
    def wants_prompt_logits(self) -> bool:
        return self.num_prompt_logprobs is not None or self.on_prompt_logits is not None

    def report_logprobs(self, count: int | None) -> None:
        """Report each token's log-probability and those of the `count` most likely ones; None: report nothing."""
        self.num_logprobs = count
        self.is_plain_greedy = self.is_plain_greedy and count is None

    def seed(self, seed: int | None, device: torch.device) -> None:
        if seed is not None:
            self.generator = torch.Generator(device=device).manual_seed(seed)

    def history(self, request, device: torch.device) -> torch.Tensor:
        """All tokens of the request, `[1, num_tokens]` int64; valid until the next call."""
        count = request.num_tokens
        if self._history is None or self._history.shape[0] < count:
            larger = torch.empty(max(64, 2 * count), dtype=torch.long, device=device)
            if self._history is not None:
                larger[: self._known] = self._history[: self._known]
            self._history = larger
        if self._known < count:
            self._history[self._known : count] = torch.tensor(request.tokens(self._known, count), device=device)
            self._known = count
        return self._history[None, :count]


def _as_config(value) -> GenerationConfig | None:
    if value is None or isinstance(value, GenerationConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"generation_config must be a GenerationConfig or a dict, got {type(value).__name__}")
    fields = dict(value)
    later = {name: fields.pop(name) for name in ("num_return_sequences", "max_new_tokens") if name in fields}
    config = GenerationConfig(**fields)
    known = GenerationConfig()
    unknown = [name for name in value if not hasattr(known, name)]
    if unknown:
        raise ValueError(f"generation_config has no setting {unknown[0]!r}")
    for name, setting in later.items():
        if setting is not None and (isinstance(setting, bool) or not isinstance(setting, int) or setting < 0):
            raise ValueError(f"{name} must be an integer >= 0, got {setting!r}")
        setattr(config, name, setting)
    return config


def _value(name: str, config: GenerationConfig | None, model):
    value = getattr(config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _is_none(name: str, config: GenerationConfig | None, model) -> bool:
    return _value(name, config, model) is None


def _batch_key(processors: LogitsProcessorList) -> tuple | None:
    """What these processors do, comparable; None where one of them looks at the tokens or is not transformers' own."""
    key = []
    for one in processors:
        if type(one) not in WITHOUT_HISTORY:
            return None
        key.append((type(one), tuple(sorted((name, _frozen(value)) for name, value in vars(one).items()))))
    return tuple(key)


def _frozen(value):
    return (value.dtype, tuple(value.flatten().tolist())) if isinstance(value, torch.Tensor) else repr(value)
