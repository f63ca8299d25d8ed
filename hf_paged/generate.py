"""`cache_implementation="paged"` inside `GenerationMixin.generate`.

Contract: three methods of GenerationMixin are wrapped, reversibly. `generate` recognises a paged call and
switches the model for its time; `_prepare_cache_for_generation` builds the PagedCache; `_get_logits_processor` lets
processors see a row without its padding. The result is that of
plain `generate`: same shape, same fields, same use of the random generator.
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
from .cache import PagedCache
from .config import PagedCacheConfig
from .history import remember, rewind, usable_past
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
    """One `generate` call that runs over a PagedCache."""

    def __init__(self, model, cache_config: PagedCacheConfig | None) -> None:
        self.model, self.cache_config = model, cache_config
        self.cache: PagedCache | None = None
        self.one_text_a_row = False  # whether the cache's rows end as the returned sequences
        self.pads_may_be_left_out = False  # whether processors may be called prompt by prompt
        self.copies = 1  # rows of each prompt


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
        requested = _setting("cache_implementation", self, generation_config, kwargs) == _IMPLEMENTATION
        if not requested and not isinstance(given, PagedCache):
            with _running(None):
                return original(self, inputs, generation_config, *args, **kwargs)
        config = None
        if requested:
            config = PagedCacheConfig.from_any(_setting("cache_config", self, generation_config, kwargs))
            _refuse_what_cannot_be_paged(self, generation_config, kwargs)
            kwargs.pop("cache_implementation", None)
            kwargs.pop("cache_config", None)
            if self.generation_config.use_cache is False:  # a model's default gives way to the call
                kwargs["use_cache"] = True
        call = _PagedCall(self, config)
        compaction = Compaction()
        if not self.config.is_encoder_decoder:
            compaction, inputs, kwargs = _arrange(inputs, kwargs, given if isinstance(given, PagedCache) else None)
        weights = bool(_setting("output_attentions", self, generation_config, kwargs))
        with _running(call), switches.switched(self, weights):
            result = original(self, inputs, generation_config, *args, **kwargs)
        if call.cache is None and requested:
            raise NotImplementedError(
                f"{type(self).__name__} prepares its own cache for generation, which "
                "cache_implementation='paged' cannot replace"
            )
        if call.one_text_a_row:
            remember(call.cache, result if isinstance(result, torch.Tensor) else result.sequences, compaction.order)
        return compaction.undo(result)

    return generate


def _arrange(inputs, kwargs: dict, cache: PagedCache | None) -> tuple[Compaction, torch.Tensor | None, dict]:
    """Bring a decoder-only call's prompt, and the cache that it continues, into the order that the loop needs.

    Raises:
        ValueError: a prompt is empty, or shorter than what the cache holds.
    """
    prompt = inputs if inputs is not None else kwargs.get("input_ids")
    is_ids = isinstance(prompt, torch.Tensor) and prompt.dim() == 2
    if is_ids and prompt.shape[1] == 0 and kwargs.get("inputs_embeds") is None:
        raise ValueError(f"input_ids {tuple(prompt.shape)} hold an empty prompt: there is nothing to continue")
    past, order = 0, None
    if is_ids and cache is not None:
        past, order = usable_past(cache, prompt, kwargs.get("attention_mask"))
    compaction = Compaction.of(prompt if is_ids else None, kwargs, past, order)
    inputs, kwargs = compaction.apply(inputs, kwargs)
    if past:
        prompt = inputs if inputs is not None else kwargs["input_ids"]
        mask = kwargs.get("attention_mask")
        if mask is None or mask.shape[1] == prompt.shape[1]:  # else input_ids are the new tokens alone
            rewind(cache, prompt, mask)
    return compaction, inputs, kwargs


def _refuse_what_cannot_be_paged(model, generation_config, kwargs: Mapping) -> None:
    if kwargs.get("past_key_values") is not None:
        raise ValueError(
            "cache_implementation='paged' makes a cache and past_key_values passes one: use only one of the two"
        )
    asked = kwargs["use_cache"] if "use_cache" in kwargs else getattr(generation_config, "use_cache", None)
    if asked is False:
        raise ValueError("cache_implementation='paged' needs a cache, but use_cache=False was given")
    if isinstance(kwargs.get("custom_generate"), str):
        raise NotImplementedError(
            f"custom_generate={kwargs['custom_generate']!r} together with cache_implementation='paged' is not supported"
        )
    if not model._supports_default_dynamic_cache():
        raise NotImplementedError(
            f"{type(model).__name__} brings its own kind of cache, so cache_implementation='paged' cannot serve it"
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
        cache = model_kwargs.get("past_key_values")
        if call.cache_config is not None:
            decoder_config = self.config.get_text_config(decoder=True)
            call.cache = cache = PagedCache(decoder_config, call.cache_config)
            if not cache.paged_layers:
                raise NotImplementedError(
                    f"{type(self).__name__} has no layer that keeps keys and values, so there is nothing for "
                    "cache_implementation='paged' to hold in blocks"
                )
            if self.config.is_encoder_decoder:
                cache = EncoderDecoderCache(cache, DynamicCache(config=decoder_config))
            model_kwargs["past_key_values"] = cache
            # Assisted decoding copies this config and would refuse the setting beside a cache.
            generation_config.cache_implementation = None
            if generation_config.is_assistant:
                cache.activate_past_recording()
        else:
            original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            call.cache = cache
        call.one_text_a_row = not self.config.is_encoder_decoder and generation_mode in _ONE_TEXT_A_ROW
        call.copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        call.pads_may_be_left_out = not self.config.is_encoder_decoder and generation_mode not in _ONE_ROW
        _tell_what_is_known(call.cache, model_kwargs, call.copies)

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


def _tell_what_is_known(cache: PagedCache, model_kwargs: Mapping, copies: int) -> None:
    if cache.get_seq_length() > 0:
        return
    mask = model_kwargs.get("attention_mask")
    if "encoder_outputs" in model_kwargs:
        mask = model_kwargs.get("decoder_attention_mask")
    if not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        mask = None
    cache.expect(attention_mask=mask, shared_rows=copies)


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
