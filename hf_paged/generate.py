"""`cache_implementation="paged"` inside `GenerationMixin.generate`.

Contract: four methods of GenerationMixin are wrapped, reversibly. `generate` recognises a paged call and switches the
model for its time; `_prepare_cache_for_generation` builds the PagedCache; `_get_logits_processor` lets processors see
a row without its padding; `_sample`, the loop of greedy search and sampling, hands what can be packed to a
ContinuousBatcher (see `batched`). The result is that of plain `generate`: same shape, same fields, same use of the
random generator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from .attention import register_attention, unregister_attention
from .batched import can_batch, sample_batched
from .cache import PagedCache
from .config import PagedCacheConfig
from .history import remember, rewind, settle, takes_more, usable_past
from .kv_scales import for_cache
from .padding import Compaction
from .row_processors import for_each_row
from .switch import switches

_IMPLEMENTATION = "paged"
# In other modes, beam search above all, a cache's rows do not end as the texts that are returned.
_ONE_TEXT_A_ROW = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
# Assisted decoding takes its processors apart, and one row needs no padding.
_ONE_ROW = (GenerationMode.ASSISTED_GENERATION,)
_originals: dict[str, object] = {}
_calls = threading.local()


class _PagedCall:
    """One `generate` call that runs over a PagedCache.

    Attributes:
        given: the cache that the caller passed, or None.
        new_cache: the one made for this call, or None.
        cache: the one in use, once the loop has been given it.
        mask: `[rows, prompt columns]` as the model sees it, or None where all is real.
        copies: rows of each prompt (beams, returned sequences).
        one_text_a_row: whether the cache's rows end as the returned sequences.
        pads_may_be_left_out: whether processors may be called prompt by prompt.
        config: settings of the cache, where the call may be handed to a batcher; else None.
        tokenizer: the caller's, for stop strings.
        batched: whether it was.
    """

    def __init__(self, model, given: PagedCache | None) -> None:
        self.model, self.given = model, given
        self.config: PagedCacheConfig | None = None
        self.tokenizer = None
        self.batched = False
        self.new_cache: PagedCache | None = None
        self.cache: PagedCache | None = None
        self.mask: torch.Tensor | None = None
        self.copies = 1
        self.one_text_a_row = self.pads_may_be_left_out = False

    def note(self, model, generation_config, generation_mode, model_kwargs: Mapping) -> None:
        """Keep what the prepared arguments tell, and tell the cache before its first token."""
        decoder_only = not model.config.is_encoder_decoder
        self.copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        self.one_text_a_row = decoder_only and generation_mode in _ONE_TEXT_A_ROW
        self.pads_may_be_left_out = decoder_only and generation_mode not in _ONE_ROW
        mask = model_kwargs.get("attention_mask" if decoder_only else "decoder_attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self.mask = mask
        if self.cache.get_seq_length() == 0:
            self.cache.expect(shared_rows=self.copies)
            if self.mask is not None:
                switches.on_causal_mask(self._leave_padding_out)

    def _leave_padding_out(self, attention_mask: torch.Tensor | None) -> None:
        # Only now is it sure that the model's attention skips the padding: one of its own may look at it, and a model
        # that puts columns of its own before the prompt has another mask.
        if attention_mask is None or attention_mask.shape[1] > self.mask.shape[1]:
            return
        if torch.equal(attention_mask.bool(), self.mask[:, : attention_mask.shape[1]].to(attention_mask.device).bool()):
            self.cache.expect(attention_mask=self.mask, shared_rows=self.copies)


@contextlib.contextmanager
def _running(call: _PagedCall | None) -> Iterator[None]:
    """Make `call` the innermost `generate` of this thread; None stands for one without pages."""
    outer = getattr(_calls, "current", None)
    _calls.current = call
    try:
        yield
    finally:
        _calls.current = outer


def _setting(name: str, model, generation_config, kwargs: Mapping):
    """A generation setting, in transformers' order: keyword, generation_config, model.generation_config."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(generation_config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _wrap_generate(original):
    @functools.wraps(original)
    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        given = kwargs.get("past_key_values")
        given = given if isinstance(given, PagedCache) else None
        requested = _setting("cache_implementation", self, generation_config, kwargs) == _IMPLEMENTATION
        if given is not None and kwargs.get("cache_implementation") != _IMPLEMENTATION:
            requested = False  # a default gives way to the cache that the call brings
        loads_code = isinstance(kwargs.get("custom_generate"), str)
        if loads_code or (not requested and given is None):
            # Code that is loaded gets all arguments and comes back here with its own call of generate.
            if not requested and isinstance(kwargs.get("cache_config"), PagedCacheConfig):
                raise ValueError("cache_config is a PagedCacheConfig, but cache_implementation is not 'paged'")
            with _running(None):
                return original(self, inputs, generation_config, *args, **kwargs)
        if given is not None and kwargs.get("cache_config") is not None:
            raise ValueError(
                "cache_config configures a new cache, but past_key_values passes one: use only one of the two"
            )
        call = _PagedCall(self, given)
        if requested:
            config = PagedCacheConfig.from_any(_setting("cache_config", self, generation_config, kwargs))
            _refuse_what_cannot_be_paged(self, generation_config, kwargs)
            for_cache(config, model=self)  # the cache itself knows no more than the model's config
            call.new_cache = PagedCache(self.config.get_text_config(decoder=True), config)
            _refuse_without_layers(self, call.new_cache)
            if can_batch(self, args, kwargs):
                call.config, call.tokenizer = config, kwargs.get("tokenizer")
            kwargs.pop("cache_implementation", None)
            kwargs.pop("cache_config", None)
            if self.generation_config.use_cache is False:  # a model's default gives way to the call
                kwargs["use_cache"] = True
        compaction = Compaction()
        if not self.config.is_encoder_decoder:
            compaction, inputs, kwargs = _arrange(inputs, kwargs, given)
        weights = bool(_setting("output_attentions", self, generation_config, kwargs))
        attention = (call.new_cache if given is None else given).knows_every_layer
        entry_length = 0 if given is None else given.get_seq_length()
        try:
            with _running(call), switches.switched(self, attention, weights):
                result = original(self, inputs, generation_config, *args, **kwargs)
        except BaseException:
            if given is not None:
                settle(given, entry_length)
            raise
        if call.cache is None:
            raise NotImplementedError(
                f"{type(self).__name__} prepares its own cache for generation, which "
                "cache_implementation='paged' cannot replace"
            )
        if not self.config.is_encoder_decoder and not call.batched:
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            told = call.one_text_a_row and kwargs.get("inputs_embeds") is None
            remember(call.cache, sequences if told else None, call.mask, compaction.order, takes_more(kwargs))
        return compaction.undo(result)

    return generate


def _arrange(inputs, kwargs: dict, cache: PagedCache | None) -> tuple[Compaction, torch.Tensor | None, dict]:
    """Bring a decoder-only call's prompt, and the cache that it continues, into the order that the loop needs.

    Raises:
        ValueError: a prompt is empty, or shorter than what the cache holds.
        NotImplementedError: embeddings that would have to be moved against a cache.
    """
    prompt = inputs if inputs is not None else kwargs.get("input_ids")
    is_ids = isinstance(prompt, torch.Tensor) and prompt.dim() == 2 and kwargs.get("inputs_embeds") is None
    if is_ids and prompt.shape[1] == 0:
        raise ValueError(f"input_ids {tuple(prompt.shape)} hold an empty prompt: there is nothing to continue")
    mask = kwargs.get("attention_mask")
    if is_ids and isinstance(mask, torch.Tensor) and mask.shape[0] != prompt.shape[0]:
        raise ValueError(f"attention_mask has {mask.shape[0]} rows and input_ids {prompt.shape[0]}")
    past, order = 0 if cache is None else cache.get_seq_length(), None
    if past and is_ids:
        past, order = usable_past(cache, prompt, kwargs.get("attention_mask"))
    elif past and cache.history is not None:
        order = cache.history.order
    compaction = Compaction.of(prompt if is_ids else None, kwargs, past, order)
    if past and not is_ids and compaction.order is not None:
        if order is None and kwargs["attention_mask"][:, -1].all():  # holes alone are the attention's to skip
            return Compaction(), inputs, kwargs
        raise NotImplementedError(
            "inputs_embeds over a cache, with a mask that has holes or right padding; pass input_ids or pad on the left"
        )
    inputs, kwargs = compaction.apply(inputs, kwargs)
    if past and is_ids:
        prompt = inputs if inputs is not None else kwargs["input_ids"]
        mask = kwargs.get("attention_mask")
        if mask is None or mask.shape[1] == prompt.shape[1]:  # else input_ids are the new tokens alone
            rewind(cache, prompt, mask, takes_more(kwargs))
    return compaction, inputs, kwargs


def _refuse_what_cannot_be_paged(model, generation_config, kwargs: Mapping) -> None:
    if kwargs.get("past_key_values") is not None:
        raise ValueError(
            "cache_implementation='paged' makes a cache and past_key_values passes one: use only one of the two"
        )
    asked = kwargs["use_cache"] if "use_cache" in kwargs else getattr(generation_config, "use_cache", None)
    if asked is False:
        raise ValueError("cache_implementation='paged' needs a cache, but use_cache=False was given")
    if not model._supports_default_dynamic_cache():
        raise NotImplementedError(
            f"{type(model).__name__} brings its own kind of cache, so cache_implementation='paged' cannot serve it"
        )


def _refuse_without_layers(model, cache: PagedCache) -> None:
    if not cache.paged_layers:
        raise NotImplementedError(
            f"{type(model).__name__} has no layer that keeps plain keys and values, so there is nothing for "
            "cache_implementation='paged' to hold in blocks"
        )


def _wrap_prepare_cache(original):
    @functools.wraps(original)
    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        call = getattr(_calls, "current", None)
        if call is None or call.model is not self:
            if generation_config.cache_implementation == _IMPLEMENTATION:
                raise NotImplementedError(
                    f"{type(self).__name__}.generate does not pass through GenerationMixin.generate, so "
                    "cache_implementation='paged' cannot serve it"
                )
            return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        # Assisted decoding copies this config and would refuse the setting beside a cache.
        generation_config.cache_implementation = None
        if call.new_cache is not None:
            call.cache = cache = call.new_cache
            if self.config.is_encoder_decoder:
                decoder_config = self.config.get_text_config(decoder=True)
                cache = EncoderDecoderCache(cache, DynamicCache(config=decoder_config))
            model_kwargs["past_key_values"] = cache
            if generation_config.is_assistant:
                cache.activate_past_recording()
        else:
            original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            call.cache = call.given
        call.note(self, generation_config, generation_mode, model_kwargs)

    return _prepare_cache_for_generation


def _wrap_get_processors(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _get_logits_processor(self, *args, **kwargs):
        processors = original(self, *args, **kwargs)
        call = getattr(_calls, "current", None)
        if call is None or call.model is not self or not call.pads_may_be_left_out:
            return processors
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        return for_each_row(functools.partial(original, self), processors, arguments, call.copies)

    return _get_logits_processor


def _wrap_sample(original):
    @functools.wraps(original)
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs):
        call = getattr(_calls, "current", None)
        if call is not None and call.model is self and call.config is not None:
            with _running(None):
                result = sample_batched(
                    self,
                    call.config,
                    input_ids,
                    model_kwargs.get("attention_mask"),
                    generation_config,
                    stopping_criteria,
                    call.tokenizer,
                )
            if result is not None:
                call.batched = True
                return result
        return original(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **model_kwargs)

    return _sample


def register() -> None:
    """Make `cache_implementation="paged"` and the attention implementation "hf_paged" known to transformers.

    Called by `import hf_paged`; calling it again changes nothing.
    """
    if _originals:
        return
    register_attention()
    for name, wrap in (
        ("generate", _wrap_generate),
        ("_prepare_cache_for_generation", _wrap_prepare_cache),
        ("_get_logits_processor", _wrap_get_processors),
        ("_sample", _wrap_sample),
    ):
        _originals[name] = GenerationMixin.__dict__[name]
        setattr(GenerationMixin, name, wrap(_originals[name]))


def unregister() -> None:
    """Put transformers back exactly as it was; calling it again changes nothing.

    Raises:
        RuntimeError: a paged `generate` is still running.
    """
    if not _originals:
        return
    if switches.active:
        raise RuntimeError("a paged generate() is still running; call unregister() when it has returned")
    for name, original in _originals.items():
        setattr(GenerationMixin, name, original)
    _originals.clear()
    unregister_attention()
