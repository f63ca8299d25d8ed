"""Logits of a step -> the next token of each request.

Contract: a request gets the token that `generate` would give it alone: transformers' own processors, built for it and
called with its own full history, then argmax or multinomial. Requests whose processors look at the scores alone and
are equal go through them together. A seeded request draws from its own generator, so neighbours, preemption and
chunking change nothing. What goes wrong for one request is its own error; nothing is noted in a request until
`Sampled.commit`, so that a step which fails can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .request import Request, TokenLogprobs
from .scheduler_output import SchedulerOutput


class Sampled:
    """The outcome of a step's sampling.

    Attributes:
        tokens: one for each request, in their order; a tensor on the host where each is its row's most likely one.
        failed: request key -> the exception that its own processors or callbacks raised.
    """

    def __init__(self, count: int) -> None:
        self.tokens: list[int] | torch.Tensor = [0] * count
        self.failed: dict[int, BaseException] = {}
        self._notes: list[tuple[list, object]] = []
        self._actions: list[Callable[[], None]] = []

    def note(self, record: list | None, value) -> None:
        if record is not None:
            self._notes.append((record, value))

    def then(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    def commit(self) -> None:
        """Note in the requests what was sampled, once the scheduler has counted it."""
        for record, value in self._notes:
            record.append(value)
        for action in self._actions:
            action()


def sampling_requests(output: SchedulerOutput, running: Sequence[Request]) -> list[Request]:
    """The requests that get a token after this step, in the order that `Scheduler.update` expects."""
    if output.decode_rows is None:
        requests = list(running[: output.num_decode])
    else:
        requests = [running[row] for row in output.decode_rows.tolist()]
    for prefill in output.prefills:
        if prefill.is_last:
            requests.append(prefill.request)
            requests.extend(prefill.samples)
    return requests


def sample_best(requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
    """The most likely token for each decoding request; `logits [len(requests), vocab]`."""
    result = Sampled(len(requests))
    result.tokens = logits.argmax(dim=-1).cpu()
    return result


def sample(output: SchedulerOutput, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
    """Choose a token for each request.

    Args:
        output: the step.
        requests: as `sampling_requests` gives them.
        logits: `[N, vocab]`: a row for each decoding row, then for each chunk all of its rows where the request wants
            its prompt's logits, else the last one where it is the last chunk.
    """
    result = Sampled(len(requests))
    rows = list(range(output.num_decode))
    at = output.num_decode
    for prefill in output.prefills:
        if prefill.request.wants_prompt_logits:
            _hand_out_prompt_logits(prefill, logits[at : at + prefill.count], result)
            at += prefill.count
        elif prefill.is_last:
            at += 1
        if prefill.is_last:
            rows.extend([at - 1] * (1 + len(prefill.samples)))
    groups: dict[tuple, list[int]] = {}
    for index, request in enumerate(requests):
        sampling = request.sampling
        if request.key in result.failed:
            continue
        if sampling.batch_key is None:
            key = ("alone", index)
        else:
            key = (sampling.do_sample, sampling.generator is None, sampling.noise is None, sampling.batch_key)
        groups.setdefault(key, []).append(index)
    for indices in groups.values():
        try:
            _sample_group(requests, indices, logits[[rows[index] for index in indices]], result)
        except Exception:
            for index in indices:  # one of them may be the cause: find out which
                try:
                    _sample_group(requests, [index], logits[rows[index] : rows[index] + 1], result)
                except Exception as error:
                    result.failed[requests[index].key] = error
    return result


def _sample_group(requests: Sequence[Request], indices: Sequence[int], logits: torch.Tensor, result: Sampled) -> None:
    """Requests with equal processors, or one request with its own; `logits [len(indices), vocab]` are a copy."""
    first = requests[indices[0]].sampling
    # float32 and a copy, as generate has it: processors may change scores in place. The best logit is the same.
    scores = logits if first.is_plain_greedy else logits.to(torch.float32, copy=True)
    if first.processors:
        if first.batch_key is None:
            history = first.history(requests[indices[0]], logits.device)
        else:
            history = torch.zeros(len(indices), 1, dtype=torch.long, device=logits.device)
        scores = first.processors(history, scores)
    if not first.do_sample:
        tokens = scores.argmax(dim=-1).tolist()
    elif first.noise is not None:
        probabilities = scores.softmax(dim=-1)
        draws = ((row, requests[index]) for index, row in zip(indices, probabilities, strict=True))
        tokens = [one.sampling.noise.draw(row, one.sampling.row, len(one.output_token_ids)) for row, one in draws]
    elif first.generator is None:
        tokens = torch.multinomial(scores.softmax(dim=-1), 1).flatten().tolist()
    else:
        probabilities = scores.softmax(dim=-1)
        tokens = [
            int(torch.multinomial(row, 1, generator=requests[index].sampling.generator))
            for index, row in zip(indices, probabilities, strict=True)
        ]
    kept: list[tuple[list | None, object]] = []
    for place, (index, token) in enumerate(zip(indices, tokens, strict=True)):
        request = requests[index]
        if request.logprobs is not None:
            row = logits[place].float().log_softmax(dim=-1)
            kept.append((request.logprobs, token_logprobs(row, token, request.sampling.num_logprobs)))
        if request.scores is not None:
            kept.append((request.scores, scores[place].clone()))
        if request.logits is not None:
            kept.append((request.logits, logits[place].to(torch.float32, copy=True)))
    for index, token in zip(indices, tokens, strict=True):
        result.tokens[index] = token
    for record, value in kept:
        result.note(record, value)


def token_logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """What a row of log-probabilities `[vocab]` says of a token, and its `count` best."""
    top: tuple = ()
    if count:
        values, tokens = row.topk(min(count, row.shape[0]))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(row[token]), top)


def _hand_out_prompt_logits(prefill, logits: torch.Tensor, result: Sampled) -> None:
    """Give a chunk's logits `[count, vocab]` to whom asked for them, each prompt position once."""
    request, sampling = prefill.request, prefill.request.sampling
    prompt = request.prompt_token_ids
    first = max(prefill.start, sampling.prompt_logits_done)
    last = min(prefill.start + prefill.count, len(prompt))
    if first >= last:
        return
    logits = logits[first - prefill.start : last - prefill.start]
    try:
        if sampling.on_prompt_logits is not None:
            sampling.on_prompt_logits(first, logits)
        if request.prompt_logprobs is not None:
            if first == 0:
                result.note(request.prompt_logprobs, None)  # nothing predicts the first token
            rows = logits.float().log_softmax(dim=-1)
            for row, position in zip(rows, range(first + 1, min(last + 1, len(prompt))), strict=False):
                told = token_logprobs(row, prompt[position], sampling.num_prompt_logprobs)
                result.note(request.prompt_logprobs, told)
    except Exception as error:
        for one in (request, *prefill.samples):
            result.failed[one.key] = error
        return

    def done() -> None:
        sampling.prompt_logits_done = last
        if last == len(prompt):
            request.wants_prompt_logits = False

    result.then(done)


def stops(request: Request, device: torch.device) -> bool:
    """Whether one of a request's own stopping criteria ends it after its newest token."""
    sampling = request.sampling
    scores = None if request.scores is None else tuple(score[None] for score in request.scores)
    return bool(sampling.criteria(sampling.history(request, device), scores).all())
