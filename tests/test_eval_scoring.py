"""`score` against plain forwards in float64, each window by itself; lockstep; what it refuses."""

import math

import numpy as np
import pytest
import tiny_models
import torch
from eval_helpers import independent, nll

import hf_paged
from hf_paged_eval import lockstep, score, scoring
from hf_paged_eval.divergence import compare

LENGTHS = (5, 17, 1, 33, 12, 70, 2, 0, 41)
CASES = [(None, None), (16, None), (16, 16), (16, 5), (33, 32), (7, 1)]


def documents(lengths=LENGTHS, seed=7):
    return tiny_models.prompts(lengths, seed)


@pytest.fixture(scope="module")
def double():
    """A float64 model; sdpa, since eager attention rounds its softmax to float32."""
    return tiny_models.build("llama_gqa", attn="sdpa", dtype=torch.float64)


@pytest.mark.parametrize("max_length, stride", CASES)
@pytest.mark.parametrize("bos", [None, 1])
def test_windows_in_float64(double, max_length, stride, bos):
    if bos is not None and stride == max_length:
        stride = None
    texts = documents()
    got = score(double, texts, max_length=max_length, stride=stride, chunk_size=6, batch_size=3, bos_token_id=bos)
    want = independent(double, texts, max_length, stride, bos)
    assert list(map(len, got.token_logprobs)) == list(map(len, want))
    assert got.num_tokens == sum(map(len, want)) == sum(max(0, n - (bos is None)) for n in LENGTHS)
    for mine, right in zip(got.token_logprobs, want, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-11)
    assert got.nll_sum == pytest.approx(nll(want), rel=1e-9)
    assert got.perplexity == pytest.approx(math.exp(nll(want) / got.num_tokens), rel=1e-9)


def test_chunks_batches_and_order_change_nothing_in_float64(double):
    texts = documents((5, 17, 1, 23, 12, 41))
    want = score(double, texts)
    for chunk, batch in ((1, 2), (3, 1), (16, 4), (64, 2), (500, 16)):
        got = score(double, texts, chunk_size=chunk, batch_size=batch)
        assert got.nll_sum == pytest.approx(want.nll_sum, rel=1e-9), (chunk, batch)
    got = score(double, texts[::-1], batch_size=2)
    for mine, right in zip(got.token_logprobs[::-1], want.token_logprobs, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-9)


@pytest.mark.demo_model
def test_demo_model_against_an_independent_sum(demo_model):
    model, tokenizer = demo_model
    text = "Paged attention keeps keys and values in blocks of a fixed size, so that memory is not reserved ahead. "
    ids = tokenizer(text * 3)["input_ids"]
    texts = [ids[:3], ids[5:35], ids[20:37], ids[2:42]]
    want = nll(independent(model, texts))
    for batch, chunk in ((1, 40), (2, 16), (4, 64)):
        got = score(model, texts, batch_size=batch, chunk_size=chunk)
        assert got.nll_sum == pytest.approx(want, rel=1e-5), (batch, chunk)
    strided = score(model, texts, max_length=24, stride=10, batch_size=4)
    assert strided.nll_sum == pytest.approx(nll(independent(model, texts, 24, 10)), rel=1e-5)
    assert strided.nll_sum != pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name, packed", [("gpt2", True), ("gemma3", True), ("mistral_swa", True), ("bloom", False)])
def test_families_and_those_that_cannot_be_packed(name, packed):
    model, texts = tiny_models.shared(name), documents()
    got = score(model, texts, chunk_size=9, reference={"block_size": 5})
    assert got.settings["packed"] is packed
    assert got.nll_sum == pytest.approx(nll(independent(model, texts)), rel=1e-5)
    assert got.reference_nll_sum == pytest.approx(got.nll_sum, rel=1e-6)
    assert got.tokens.agrees.all() and got.tokens.kl.max() < 1e-6


def test_a_model_that_cannot_take_chunks_is_given_the_whole(recwarn):
    """qwen3_next's linear layers begin anew with each chunk: the number would be wrong without a word."""
    model, texts = tiny_models.shared("qwen3_next"), documents((12, 30))
    got = score(model, texts, chunk_size=5)
    assert got.nll_sum == pytest.approx(nll(independent(model, texts)), rel=1e-5) and not got.settings["packed"]
    if not lockstep._chunks_work(model):
        assert any("chunk_size is not used" in str(one.message) for one in recwarn)


def test_the_table_says_which_token_is_which():
    model, texts = tiny_models.shared("llama_gqa"), documents((9, 1, 5))
    table = score(model, texts, max_length=4, stride=2).tokens
    assert table.document.tolist() == [0] * 8 + [2] * 4
    assert table.index.tolist() == [*range(1, 9), *range(1, 5)]
    assert table.position.tolist() == [1, 2, 3, 2, 3, 2, 3, 2, 1, 2, 3, 2]
    assert table.reference_logprob is table.kl is table.agrees is None and not table.has_reference
    before = score(model, texts, max_length=4, stride=2, bos_token_id=1).tokens
    assert before.document.tolist() == [0] * 9 + [1] + [2] * 5 and before.position.tolist()[:6] == [1, 2, 3, 2, 3, 2]


@pytest.mark.parametrize("setting", [{}, {"block_size": 3}, {"num_blocks": 24, "block_size": 4}])
def test_the_reference_against_itself_is_equal_to_the_bit(setting):
    model, texts = tiny_models.shared("llama_gqa"), documents((70, 33, 5, 61, 12, 8))
    got = score(model, texts, cache_config=setting, reference=setting, chunk_size=7, batch_size=4)
    assert (got.tokens.kl == 0).all() and got.tokens.agrees.all()
    assert (got.tokens.logprob == got.tokens.reference_logprob).all()
    assert got.perplexity == got.reference_perplexity


def test_pools_of_two_sizes_stay_in_step():
    model, texts = tiny_models.shared("llama_gqa"), documents((70, 33, 5, 61, 12, 8))
    small = {"num_blocks": 18, "block_size": 4}
    got = score(model, texts, cache_config=small, reference={"block_size": 5}, chunk_size=7, batch_size=6)
    assert got.nll_sum == pytest.approx(nll(independent(model, texts)), rel=1e-5) and got.tokens.kl.max() < 1e-6


def test_a_reduced_format_is_compared_with_the_reference(double):
    """Against divergences from full logits that two batchers hand out apart."""
    texts, fp8 = documents((70, 33, 5)), {"kv_cache_dtype": "fp8_e4m3"}
    got = score(double, texts, cache_config=fp8, reference={"kv_cache_dtype": None}, chunk_size=16)
    assert got.nll_sum == pytest.approx(score(double, texts, cache_config=fp8, chunk_size=16).nll_sum, rel=1e-9)
    assert got.reference_nll_sum == pytest.approx(score(double, texts).nll_sum, rel=1e-9)
    full = []
    for config in (fp8, None):
        rows = {}
        with hf_paged.ContinuousBatcher(double, cache_config=config) as batcher:
            for number, text in enumerate(texts):
                keep = rows.setdefault(number, [])
                batcher.add_request(
                    text[:-1],
                    generation_config={"max_new_tokens": 0},
                    on_prompt_logits=lambda start, logits, keep=keep: keep.append(logits.clone()),
                )
            while any(sum(map(len, rows[number])) < len(text) - 1 for number, text in enumerate(texts)):
                batcher.step()
        full.append(torch.cat([torch.cat(rows[number]) for number in range(len(texts))]).log_softmax(-1))
    candidate, reference = full
    kl = (reference.exp() * (reference - candidate)).sum(-1)
    np.testing.assert_allclose(got.tokens.kl, kl.numpy(), rtol=1e-6, atol=1e-12)
    assert got.tokens.agrees.tolist() == (candidate.argmax(-1) == reference.argmax(-1)).tolist()
    assert got.tokens.kl.mean() > 1e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
def test_comparison_is_the_formula(dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(40, 5000, generator=generator, dtype=torch.float64) * 4).to(dtype)
    other = (logits + torch.randn(40, 5000, generator=generator, dtype=torch.float64) * 0.2).to(dtype)
    targets = torch.randint(0, 5000, (40,), generator=generator)
    before = logits.clone(), other.clone()
    got = compare(logits, targets, other)
    assert torch.equal(logits, before[0]) and torch.equal(other, before[1])
    q, p = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    rows = torch.arange(40)
    np.testing.assert_allclose(got.logprob, q[rows, targets].numpy(), atol=tolerance)
    np.testing.assert_allclose(got.reference_logprob, p[rows, targets].numpy(), atol=tolerance)
    np.testing.assert_allclose(got.kl, (p.exp() * (p - q)).sum(-1).numpy(), atol=tolerance)
    if dtype != torch.bfloat16:  # whose logits tie
        assert got.agrees.tolist() == (q.argmax(-1) == p.argmax(-1)).tolist()
    best = logits.double().argmax(-1)
    assert compare(logits, best).best.all() and compare(logits, best).kl is None
    assert not compare(logits, (best + 1) % 5000).best.any() or dtype == torch.bfloat16


def test_impossible_tokens_and_what_is_not_a_number():
    logits, other = torch.zeros(4, 3), torch.zeros(4, 3)
    logits[0, 2] = other[0, 2] = -math.inf  # impossible for both: counts as nothing
    other[1, 2] = -math.inf  # for the reference alone: log 3 - log 2 is left
    logits[2, 2] = -math.inf  # for the candidate alone: infinitely far
    logits[3, 0] = math.nan
    got = compare(logits, torch.tensor([0, 0, 0, 1]), other)
    assert got.kl[:3].tolist() == pytest.approx([0, math.log(1.5), math.inf])
    assert math.isnan(got.kl[3]) and math.isnan(got.logprob[3]) and not got.best[3] and not got.agrees[3]


def test_a_failure_is_raised_and_leaves_nothing_behind(monkeypatch):
    model, made = tiny_models.shared("llama_gqa"), []
    plain = hf_paged.ContinuousBatcher

    def batcher(*args, **kwargs):
        made.append(plain(*args, **kwargs))
        return made[-1]

    def fail(*args):
        raise KeyboardInterrupt if len(made) > 2 else ZeroDivisionError("in the middle")

    monkeypatch.setattr(lockstep, "ContinuousBatcher", batcher)
    monkeypatch.setattr(scoring, "compare", fail)
    model.train()
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            score(model, documents((9, 12)), reference={})
        assert model.training
    model.eval()
    assert len(made) == 4
    for one in made:
        with pytest.raises(RuntimeError, match="closed"):
            one.add_request([3, 4])
    monkeypatch.undo()
    assert score(model, documents((9, 12))).num_tokens == 19


def test_dropout_is_off_and_modes_come_back():
    model, texts = tiny_models.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5), documents((20, 9))
    want = score(model, texts).nll_sum
    model.train()
    model.lm_head.eval()
    assert score(model, texts).nll_sum == want
    assert model.training and model.transformer.drop.training and not model.lm_head.training


def test_progress_shows_tokens_rate_and_time_left(capfd):
    score(tiny_models.shared("llama_gqa"), documents(), progress_bar=True)
    shown = capfd.readouterr()
    assert "scoring" in shown.err and "173/173" in shown.err and "tok/s" in shown.err and "<" in shown.err
    assert not shown.out
    score(tiny_models.shared("llama_gqa"), documents((5,)))
    assert not capfd.readouterr().err


def test_arrays_tensors_and_lists_are_documents():
    model, texts = tiny_models.shared("llama_gqa"), documents((20, 9, 4))
    mixed = [texts[0], np.array(texts[1], dtype=np.int32), torch.tensor(texts[2])]
    assert score(model, mixed).token_logprobs == score(model, (one for one in texts)).token_logprobs


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(documents="text"), "documents must be lists of token ids, got str"),
        (dict(documents=["text"]), "document 0 is a text"),
        (dict(documents=[[3, 4], [5, 1999]]), "document 1: token id 1999 is out of range, the model has 199"),
        (dict(documents=[[3, -1]]), "token id -1"),
        (dict(documents=[[3.5, 4.0]]), "must be integers, got float64"),
        (dict(documents=[3, 4]), r"document 0 must be one list of token ids, got shape \[\]"),
        (dict(documents=[]), "nothing to score in 0 documents"),
        (dict(documents=[[3], []]), "nothing to score in 2 documents"),
        (dict(chunk_size=0), "chunk_size must be an integer >= 1, got 0"),
        (dict(batch_size=True), "batch_size must be an integer"),
        (dict(stride=4), "stride=4 needs max_length"),
        (dict(max_length=4, stride=5), "stride must be from 1 to max_length=4"),
        (dict(cache_config={"blocksize": 4}), "cache_config: .*blocksize"),
        (dict(reference={"block_size": 0}), "reference: .*block_size"),
        (dict(bos_token_id=500), "bos_token_id: token id 500 is out of range"),
        (dict(cache_config={"num_blocks": 1, "block_size": 2}), "needs 3 blocks of 2 tokens, the pool has 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    arguments = {"documents": [[3, 4, 5, 6, 7, 8]], **arguments}
    with pytest.raises(ValueError, match=words):
        score(tiny_models.shared("llama_gqa"), arguments.pop("documents"), **arguments)


def test_a_window_longer_than_the_model_was_made_for_is_said():
    model = tiny_models.shared("llama_gqa")
    with pytest.warns(UserWarning, match="longer than the 512 positions"):
        score(model, documents((520,)))
