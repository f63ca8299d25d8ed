"""Greedy search and sampling of a paged `generate` call, through a ContinuousBatcher.

Contract: `sample_batched` takes what `GenerationMixin._sample` is given, after transformers has prepared and checked
everything, and returns what that returns; `can_batch` says whether it may. Each row is a request without its padding,
and a finished row stops costing. Sampled tokens are those that the loop over the whole batch would have drawn from
torch's global generator (see `LoopNoise`).

One batcher a model stays for the next call, so that calls of several threads share the running batch; `release` closes
it, and so does collecting the model.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator, Mapping

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from .adapters import rows_choose_adapters
from .batcher import ContinuousBatcher
from .calls import Call
from .config import PagedCacheConfig
from .kv_scales import for_cache
from .packed_metadata import PackingError
from .placement import placement
from .sampling import SamplingTemplate

logger = logging.getLogger("hf_paged")

# Methods that give a model's forward its inputs; a model with its own may put in more than tokens and positions.
_INPUT_METHODS = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
    "_expand_inputs_for_generation",
    "_prepare_model_inputs",
    "_prefill",
)
# Arguments of `generate` that are neither settings nor more for the model.
_KNOWN_ARGUMENTS = frozenset(("input_ids", "attention_mask", "tokenizer", "synced_gpus", "use_model_defaults"))
_SETTINGS = frozenset(vars(GenerationConfig()))


def can_batch(model, args: tuple, kwargs: Mapping) -> bool:
    """Whether a `generate` call with these arguments, behind inputs and generation_config, may take this way.

    Everything that is about the whole batch, or that the loop calls at each step, takes the other one.
    """
    if args or model.config.is_encoder_decoder or kwargs.get("synced_gpus") or rows_choose_adapters(model):
        return False
    if any(
        value is not None and name not in _KNOWN_ARGUMENTS and name not in _SETTINGS for name, value in kwargs.items()
    ):
        return False
    # Looked up on the model itself: prompt tuning, for one, puts its own on an instance.
    return all(_plain(model, name) is _plain(GenerationMixin, name) for name in _INPUT_METHODS)


def _plain(owner, name: str):
    method = getattr(owner, name, None)
    return getattr(method, "__func__", method)


def sample_batched(
    model,
    config: PagedCacheConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig,
    stopping_criteria,
    tokenizer,
) -> torch.Tensor | None:
    """The sequences `[rows, columns]` of a prepared call, or None where it must take the other way.

    Args:
        input_ids: `[rows, prompt columns]`, `num_return_sequences` equal rows in a run.
        attention_mask: `[rows, prompt columns]` or None.
        generation_config: complete, with the special tokens' tensors and max_length in columns.
        stopping_criteria: as prepared from it.
    """
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    # Without an end-of-sequence token the loop does not pad: a row that a stop string ended goes on beside the others.
    unpadded = not has_eos and len(stopping_criteria) > 1
    if generation_config.return_dict_in_generate or generation_config.is_assistant or (unpadded and len(input_ids) > 1):
        return None
    if generation_config.guidance_scale not in (None, 1):
        return None  # its processor runs the model itself, for the whole batch
    if attention_mask is not None and not (attention_mask.dim() == 2 and attention_mask.any(dim=1).all()):
        return None
    count = generation_config.num_return_sequences or 1
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    prompts = [ids[keep].tolist() for ids, keep in zip(input_ids[::count], real[::count], strict=True)]
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    noise = LoopNoise(len(input_ids), input_ids.device) if generation_config.do_sample else None
    template = _RowTemplate(model, generation_config, max_new_tokens, tokenizer, noise)
    with contextlib.ExitStack() as stack:
        try:
            batcher = stack.enter_context(_borrowed(model, config))
            batcher.read_weights()
            call = stack.enter_context(Call(batcher, prompts, template, {}))
        except (PackingError, ValueError, NotImplementedError) as error:
            logger.debug(f"{type(model).__name__} generates in the loop over the whole batch: {error}")
            return None  # what is wrong there too is refused there
        batcher.drivers.run_until(lambda: call.is_finished)
        outputs = call.outputs()
    for output in outputs:
        if output.error is not None:
            raise output.error
    texts = [output.output_token_ids for output in outputs]
    longest = max(map(len, texts))
    if noise is not None:
        noise.finish(longest)
    pad = generation_config._pad_token_tensor
    result = input_ids.new_full((len(input_ids), input_ids.shape[1] + longest), 0 if pad is None else int(pad))
    result[:, : input_ids.shape[1]] = input_ids
    for row, text in enumerate(texts):
        result[row, input_ids.shape[1] : input_ids.shape[1] + len(text)] = torch.tensor(text, device=result.device)
    return result


class _RowTemplate(SamplingTemplate):
    """A generation config that `generate` has already made complete, for each of its rows."""

    def __init__(self, model, config: GenerationConfig, max_new_tokens: int, tokenizer, noise) -> None:
        self.model, self.tokenizer, self._noise = model, tokenizer, noise
        self.num_return_sequences = config.num_return_sequences or 1
        self.config = copy.copy(config)
        self.config.num_return_sequences = 1
        # A row's own tokens count, not the columns of the padded batch.
        self.config.max_new_tokens = max_new_tokens
        self._has_default_max_length = self._has_default_min_length = True
        self._no_new_tokens = False
        self._row = 0

    def for_prompt(self, *args, **kwargs):
        sampling = super().for_prompt(*args, **kwargs)
        sampling.noise, sampling.row = self._noise, self._row
        self._row += 1
        return sampling


class LoopNoise:
    """The random numbers that `torch.multinomial(probabilities [rows, vocab], 1)` would use, step after step.

    It draws one exponential variate for each probability, row by row, and takes the largest quotient (the exponential
    race; Efraimidis and Spirakis 2006). So the draw of one row at one step can be repeated alone, whenever the
    batcher comes to it: from the generator's state at the start of that step.

    Args:
        num_rows: rows of the batch, finished ones included, which the loop draws for as well.
        device: of the scores.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._global = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        self._before = self._global.get_state()
        self._generator = torch.Generator(device=device)
        self._states = [self._before]  # at the start of each step, as far as any row has come
        self._drawn: tuple[int, torch.Tensor] | None = None

    def draw(self, probabilities: torch.Tensor, row: int, step: int) -> int:
        """The token of one row, from its `[vocab]` float32 probabilities."""
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = (step, self._numbers(step, probabilities))
        return int((probabilities / self._drawn[1][row]).argmax())

    def _numbers(self, step: int, like: torch.Tensor) -> torch.Tensor:
        while len(self._states) <= step:
            self._numbers(len(self._states) - 1, like)
        self._generator.set_state(self._states[step])
        numbers = like.new_empty(self._num_rows, like.shape[0]).exponential_(generator=self._generator)
        if len(self._states) == step + 1:
            self._states.append(self._generator.get_state())
        return numbers

    def finish(self, num_steps: int) -> None:
        """Leave the global generator as the loop would, unless something else has used it meanwhile."""
        if torch.equal(self._global.get_state(), self._before):
            self._global.set_state(self._states[num_steps])


# -- one batcher a model ---------------------------------------------------------------------------


class _Batchers:
    """What a model keeps for its `generate` calls. A copy of the model, or a pickled one, gets an empty one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.key: tuple | None = None
        self.batcher: ContinuousBatcher | None = None
        self.users: dict[ContinuousBatcher, int] = {}

    def __deepcopy__(self, memo) -> _Batchers:
        return _Batchers()

    def __reduce__(self):
        return _Batchers, ()

    def borrow(self, model, config: PagedCacheConfig) -> ContinuousBatcher:
        # Where the parameters are computed with, what they are, and a file of scales must not change under a batcher.
        scales = for_cache(config)
        key = (config, placement(model), None if scales is None else scales.digest())
        with self.lock:
            if self.batcher is None or self.key != key:
                self._retire()
                self.batcher, self.key = ContinuousBatcher(model, cache_config=config), key
            self.users[self.batcher] = self.users.get(self.batcher, 0) + 1
            return self.batcher

    def give_back(self, batcher: ContinuousBatcher) -> None:
        with self.lock:
            self.users[batcher] -= 1
            if not self.users[batcher]:
                del self.users[batcher]
                if batcher is not self.batcher:
                    batcher.close()

    def _retire(self) -> None:
        """Close the batcher that stays, now or when its last call returns."""
        batcher, self.batcher = self.batcher, None
        if batcher is not None and batcher not in self.users:
            batcher.close()

    def release(self) -> None:
        with self.lock:
            self._retire()


@contextlib.contextmanager
def _borrowed(model, config: PagedCacheConfig) -> Iterator[ContinuousBatcher]:
    batchers = vars(model).setdefault("_hf_paged_batchers", _Batchers())
    batcher = batchers.borrow(model, config)
    try:
        yield batcher
    finally:
        batchers.give_back(batcher)


def release(model) -> None:
    """Give back the memory that `generate(cache_implementation="paged")` keeps for a model's next call.

    Calls that are running end first; the next call starts anew.
    """
    batchers = vars(model).get("_hf_paged_batchers")
    if batchers is not None:
        batchers.release()
