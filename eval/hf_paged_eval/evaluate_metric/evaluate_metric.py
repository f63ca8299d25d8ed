"""Perplexity through the paged cache, as a metric of `evaluate`.

Contract: `evaluate.load(hf_paged_eval.METRIC_PATH)` copies this file elsewhere and imports it there, so it imports
installed packages only. `compute(predictions=texts, model=..., ...)` scores each text as a document of its own.
"""

import datasets
import evaluate

from hf_paged_eval import make_corpus, score, summarize
from hf_paged_eval.loading import load_model

_DESCRIPTION = """Perplexity of texts under a causal language model that reads them through a paged KV cache, in
whatever format the cache keeps keys and values. With `reference`, also how far the model's predictions move from those
with another cache setting."""

_INPUTS = """
Args:
    predictions (list of str): the texts.
    model (str or model): a folder or Hub name, "demo", or a model of transformers.
    tokenizer: of the model; needed where the model itself is given.
    cache_config (dict): fields of hf_paged.PagedCacheConfig, for example {"kv_cache_dtype": "fp8_e4m3"}.
    reference (dict): another cache_config to compare with; {} is the model's own dtype.
    bos (str): "auto", "none", "once" or "each_window": what stands before a text.
    max_length, stride, chunk_size, batch_size: as hf_paged_eval.score takes them.
    dtype, device: of a model that is loaded by name.
Returns:
    perplexity: of all tokens together; mean_perplexity: mean of the texts' own; perplexities: these, in order;
    word_perplexity, byte_perplexity, bits_per_byte: the same sum over other units; num_tokens: scored tokens;
    bos: the policy that was used; summary: with a reference, the divergences.
"""


class PagedPerplexity(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(
        self,
        predictions,
        model="demo",
        tokenizer=None,
        cache_config=None,
        reference=None,
        bos="auto",
        max_length=None,
        stride=None,
        chunk_size=64,
        batch_size=8,
        dtype="auto",
        device=None,
    ) -> dict:
        if isinstance(model, str):
            model, loaded = load_model(model, dtype=dtype, device=device)
            tokenizer = tokenizer or loaded
        elif tokenizer is None:
            raise ValueError("with a model that is loaded already, give its tokenizer too")
        corpus = make_corpus("predictions", predictions, tokenizer, bos=bos, keep_empty=True)
        result = score(
            model,
            corpus,
            cache_config=cache_config,
            reference=reference,
            max_length=max_length,
            stride=stride,
            chunk_size=chunk_size,
            batch_size=batch_size,
        )
        units = corpus.normalise(result)
        own = [perplexity(logprobs) for logprobs in result.token_logprobs]
        empty = [number for number, value in enumerate(own) if value is None]
        if empty:
            raise ValueError(f"text {empty[0]} has no token to score with bos={corpus.bos_policy!r}: it is too short")
        return {
            "perplexity": result.perplexity,
            "mean_perplexity": sum(own) / len(own),
            "perplexities": own,
            "word_perplexity": units.word_perplexity,
            "byte_perplexity": units.byte_perplexity,
            "bits_per_byte": units.bits_per_byte,
            "num_tokens": result.num_tokens,
            "bos": corpus.bos_policy,
            "summary": summarize(result.tokens).to_dict() if reference is not None else None,
        }


def perplexity(logprobs):
    """exp of the mean negative log-probability; None of nothing."""
    import math

    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else None
