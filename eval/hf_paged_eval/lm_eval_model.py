"""hf_paged as a model of lm-evaluation-harness.

Contract: importing this module registers `PagedLM` under the name "hf_paged"; `lm_eval.simple_evaluate(
model="hf_paged", model_args="pretrained=...,kv_cache_dtype=fp8_e4m3")` and `hf-paged lm-eval --model hf_paged ...` then
use it. Without the package lm_eval the import raises a RuntimeError that says what to install. What is scored goes
through the cache as in `score`; the windows of a rolling log-likelihood are the harness' own: of full length, the last
one too, and with the prefix token before the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from hf_paged import ContinuousBatcher, PackingError, PagedCacheConfig

from .spans import Span, score_spans

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise RuntimeError(
        "this needs lm-evaluation-harness, which is not installed: pip install 'hf-paged[lm-eval]'"
    ) from error

NAME = "hf_paged"
_NEW_TOKENS = 256  # what the harness' own models generate where a task does not say
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model(NAME)
class PagedLM(LM):
    """A causal model of transformers behind a paged cache.

    Args:
        pretrained: a folder or Hub name, "demo" for the demo model, or the model itself.
        tokenizer: one of transformers, or its folder or name; None for the model's.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: where the model runs; None for a GPU if there is one. Not for a model that is given.
        batch_size: sequences at the same time; "auto" is 8.
        max_batch_size: taken for the harness' sake; has no effect, since nothing searches for a batch size.
        max_length: tokens that the model sees at most; None for the positions that it was made for.
        chunk_size: tokens of one sequence in one forward.
        add_bos_token: whether BOS goes before every text; None for what the tokenizer does by itself.
        prefix_token_id: the token before texts that have no context; None for BOS, or EOS where there is none.
        trust_remote_code: as in transformers.
        cache_config: fields of PagedCacheConfig: block_size, kv_cache_dtype and so on.
    """

    def __init__(
        self,
        pretrained: Any = "demo",
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = 8,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        chunk_size: int = 64,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        trust_remote_code: bool = False,
        **cache_config,
    ) -> None:
        super().__init__()
        self.cache_config = PagedCacheConfig.from_any(cache_config)
        given = not isinstance(pretrained, str)
        if pretrained == "demo":
            from hf_paged import demo_model_path

            pretrained = str(demo_model_path())
        if given:
            self.model, source = pretrained, getattr(pretrained, "name_or_path", "")
        else:
            source = pretrained
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
            self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model.eval()
        if tokenizer is None or isinstance(tokenizer, str):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer or source, trust_remote_code=trust_remote_code)
        self.tokenizer = tokenizer
        self._device = self.model.device
        self.batch_size = 8 if batch_size in (None, "auto") else int(batch_size)
        self.chunk_size, self.add_bos_token, self._prefix = int(chunk_size), add_bos_token, prefix_token_id
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = int(max_length or positions or 2048)

    @property
    def prefix_token_id(self) -> int:
        """The token before texts that have no context."""
        for token in (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("the tokenizer has neither BOS nor EOS: give prefix_token_id")

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        return self.tokenizer.get_chat_template(chat_template if isinstance(chat_template, str) else None)

    def get_model_info(self) -> dict:
        """What the harness writes beside its results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "cache_config": self.cache_config.to_dict(),
        }

    # What the harness asks for

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability, and whether greedy decoding would give it."""
        spans = [self._pair(*request.args) for request in requests]
        found = self._score([self._fitted(*span) for span in spans], "log-likelihoods", disable_tqdm)
        answers = []
        for request, (logprob, best) in zip(requests, found, strict=True):
            answers.append((logprob, best))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """For each (text,): its log-probability after the prefix token, in windows of `max_length`."""
        spans: list[Span] = []
        counts = []
        for request in requests:
            tokens = self._encode(request.args[0], add_special_tokens=False)
            windows = list(rolling_spans(tokens, self.prefix_token_id, self.max_length))
            spans += windows
            counts.append(len(windows))
        found = iter(self._score(spans, "rolling log-likelihoods", disable_tqdm))
        answers = []
        for request, count in zip(requests, counts, strict=True):
            answers.append(sum(next(found)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """For each (context, settings): the text up to the first of its stop strings."""
        prompts, settings, stops = [], [], []
        for request in requests:
            context, given = request.args
            config, until = self._generation(dict(given))
            room = self.max_length - config["max_new_tokens"]
            if room < 1:
                raise ValueError(f"max_gen_toks={config['max_new_tokens']} leaves no room in {self.max_length} tokens")
            prompts.append(self._encode(context)[-room:] or [self.prefix_token_id])
            settings.append(config)
            stops.append(until)
        criteria = [[_Stops(self.tokenizer, until, len(ids))] for until, ids in zip(stops, prompts, strict=True)]
        texts = self._generate(prompts, settings, criteria, disable_tqdm)
        answers = []
        for request, text, until in zip(requests, texts, stops, strict=True):
            answers.append(text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))])
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    # Inside

    def _encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and text.startswith(bos):
            special = False  # a chat template has put it there
        options = {} if special is None else {"add_special_tokens": special}
        ids = list(self.tokenizer(text, verbose=False, **options)["input_ids"])
        if special and self.tokenizer.bos_token_id is not None and ids[:1] != [self.tokenizer.bos_token_id]:
            ids = [self.tokenizer.bos_token_id, *ids]  # asked for, and the tokenizer does not do it by itself
        return ids

    def _pair(self, context: str, continuation: str) -> Span:
        """Token ids of both; spaces between them belong to the continuation, as the harness has it."""
        if not context:
            ids = self._encode(continuation, add_special_tokens=False)
            if ids and ids[0] == self.prefix_token_id:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        bare = context.rstrip()
        if bare:
            context, continuation = bare, context[len(bare) :] + continuation
        before = self._encode(context)
        return before, self._encode(context + continuation)[len(before) :]

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> Span:
        """The last `max_length` tokens that the model sees before the continuation's last token."""
        continuation = continuation[-self.max_length :]
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def _score(self, spans: Sequence[Span], what: str, quiet: bool) -> list[tuple[float, bool]]:
        """Sum of log-probabilities and whether all were the best; an empty continuation has (0, True)."""
        full = [span for span in spans if len(span[1])]
        total = sum(len(context) + len(continuation) - 1 for context, continuation in full)
        with tqdm(total=total, unit="tok", desc=what, disable=quiet) as bar:
            found = score_spans(
                self.model,
                full,
                (self.cache_config,),
                chunk_size=self.chunk_size,
                batch_size=self.batch_size,
                on_tokens=bar.update,
            )
        scored = iter(found)
        answers = []
        for span in spans:
            if not len(span[1]):
                answers.append((0.0, True))
                continue
            (one,) = next(scored)
            answers.append((float(one.logprob.sum()), bool(one.best.all())))
        return answers

    def _generation(self, given: dict) -> tuple[dict, list[str]]:
        """Settings of `generate` from the harness' names, and the stop strings."""
        until = given.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        eos = self.tokenizer.eos_token
        until = [stop for stop in dict.fromkeys([*until, *([eos] if eos else [])]) if stop]
        lengths = [given.pop(name, None) for name in _LENGTH_NAMES]
        count = next((int(length) for length in lengths if length is not None), _NEW_TOKENS)
        temperature = float(given.pop("temperature", 0.0) or 0.0)
        sample = given.pop("do_sample", None)
        sample = temperature > 0 if sample is None else bool(sample)
        config = {"max_new_tokens": count, "do_sample": sample, **given}
        if sample and temperature > 0:
            config["temperature"] = temperature
        return config, until

    def _generate(self, prompts: list[list[int]], settings: list[dict], criteria: list[list], quiet: bool) -> list[str]:
        try:
            batcher = ContinuousBatcher(
                self.model, cache_config=self.cache_config, scheduler_config={"max_num_seqs": self.batch_size}
            )
        except PackingError:
            each = tqdm([*zip(prompts, settings, criteria, strict=True)], disable=quiet)
            tokens = [self._generate_alone(*one) for one in each]
        else:
            with batcher:
                outputs = batcher.generate(prompts, settings, progress_bar=not quiet, stopping_criteria=criteria)
            tokens = [list(output.output_token_ids) for output in outputs]
        # As it stands: a special token may be a stop string.
        return [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens]

    def _generate_alone(self, prompt: list[int], settings: dict, criteria: list) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache_implementation="paged",
            cache_config=self.cache_config.to_dict(),
            stopping_criteria=StoppingCriteriaList(criteria),
            **settings,
        )
        return out[0, len(prompt) :].tolist()


class _Stops(StoppingCriteria):
    """Whether one of some strings stands in the new text.

    transformers' own `stop_strings` take a tokenizer's vocabulary apart and cannot do so with every kind.
    """

    def __init__(self, tokenizer, stops: Sequence[str], num_prompt_tokens: int) -> None:
        self._tokenizer, self._stops, self._start = tokenizer, stops, num_prompt_tokens
        # A token stands for one byte at least; some more, for a character that begins in an earlier one.
        self._tail = max((len(stop.encode()) for stop in stops), default=0) + 4

    def __call__(self, input_ids, scores=None, **kwargs) -> torch.Tensor:
        new = input_ids[0, max(self._start, input_ids.shape[1] - self._tail) :]
        text = self._tokenizer.decode(new, skip_special_tokens=False)
        return torch.tensor([any(stop in text for stop in self._stops)], device=input_ids.device)


def rolling_spans(tokens: Sequence[int], prefix: int, max_length: int) -> Iterator[Span]:
    """The harness' windows of a text: each token predicted once, from as much context as `max_length` allows.

    The first window begins with the prefix token; every further one has `max_length` tokens of context and
    prediction less one, the last one too, however few it predicts.
    """
    whole, scored = [prefix, *tokens], 1
    while scored < len(whole):
        end = min(scored + max_length, len(whole))
        start = 0 if scored == 1 else end - max_length - 1
        yield whole[start:scored], whole[scored:end]
        scored = end


def run(arguments: Sequence[str]) -> None:
    """The harness' own command line, with `hf_paged` among its models."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["hf-paged lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
