"""Batchers over tiny models, and plain generate as the oracle of every request.

Contract: `expected` is what plain `generate` gives for one prompt alone, with the settings of the request;
`check` compares token for token and forgives a near-tie of a greedy oracle only.
"""

from __future__ import annotations

import functools
import threading

import torch
from more_models import MORE, is_encoder_decoder, shared_more
from tiny_models import FAMILIES, assert_same_text, shared, text_alone

from hf_paged import ContinuousBatcher

NEW = 12
SMALL = {"block_size": 4, "num_blocks": 60}
# Models that must take the packed way; the others of the zoo are refused with a reason.
PACKABLE = [name for name in FAMILIES if name not in ("bloom", "qwen3_next")]
REFUSED = {
    "bloom": "computes attention itself",
    "qwen3_next": "keeps more than keys and values: LinearAttention",
    "gpt_neo": "computes attention itself",
    "gptj": "computes attention itself",
    "falcon": "computes attention itself",
    "falcon_alibi": "computes attention itself",
    "mpt": "computes attention itself",
    "xglm": "computes attention itself",
    "llama4": "masks in a way that is not known to keep sequences apart",
    "minimax": "cache of its own",
    "lfm2": "keeps more than keys and values",
    "bamba": "keeps more than keys and values",
    "granitemoehybrid": "keeps more than keys and values",
    "mamba": "keeps more than keys and values",
    "t5": "not a decoder-only model",
    "bart": "not a decoder-only model",
}
PACKABLE_MORE = [name for name in MORE if name not in REFUSED and not is_encoder_decoder(name)]


def model_of(name: str):
    """The shared model of a family, of either zoo."""
    return shared(name) if name in FAMILIES else shared_more(name)


def batcher(name_or_model="llama_gqa", **settings) -> ContinuousBatcher:
    """A batcher with small blocks and a small pool, unless told otherwise."""
    model = model_of(name_or_model) if isinstance(name_or_model, str) else name_or_model
    cache_config = {**SMALL, **settings.pop("cache_config", {})}
    own = {name: settings.pop(name) for name in list(settings) if name.startswith(("max_num", "policy", "chunked"))}
    return ContinuousBatcher(model, cache_config=cache_config, scheduler_config=own, **settings)


def greedy(new: int = NEW, **settings) -> dict:
    return {"max_new_tokens": new, "do_sample": False, **settings}


@functools.cache
def _expected(name: str, prompt: tuple[int, ...], settings: tuple) -> list[int]:
    return plain(model_of(name), prompt, **dict(settings))


def expected(name: str, prompt, new: int = NEW, **settings) -> list[int]:
    """New tokens of plain greedy generate for one prompt alone; kept for other tests."""
    if not settings:
        return text_alone(name, model_of(name), prompt, new)
    return _expected(name, tuple(prompt), tuple(sorted(greedy(new, **settings).items())))


def plain(model, prompt, **settings) -> list[int]:
    """New tokens of plain generate for one prompt alone."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt) :].tolist()


def check(name: str, prompts, outputs, new: int = NEW) -> None:
    """Each output belongs to its prompt and is the oracle's text."""
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.prompt_token_ids) == list(prompt)
        assert output.finish_reason == "length", output
        assert_same_text(model_of(name), prompt, list(output.output_token_ids), expected(name, prompt, new))


def check_idle(one: ContinuousBatcher) -> None:
    """Everything was given back."""
    one.check_integrity()
    stats = one.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)


def in_threads(*functions, timeout: float = 60):
    """Run functions in threads; return their results or exceptions, in order."""
    results: list = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a caller is still blocked"
    return results
