"""What stands on `score`: greedy agreement, needles, the metric of `evaluate`, `hf-paged eval score`."""

import dataclasses
import json
import math

import pytest
import tiny_models
from eval_helpers import independent, nll, words_tokenizer
from typer.testing import CliRunner

import hf_paged
import hf_paged_eval
from hf_paged.cli import app
from hf_paged_eval import greedy_agreement, needle_task
from hf_paged_eval.needle import needle_prompt
from hf_paged_eval.spans import score_spans

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
WORDS = [f"word{number}" for number in range(150)]


def test_greedy_text_is_that_of_plain_generate():
    model, prompts = tiny_models.shared("llama_gqa"), tiny_models.prompts()
    got = greedy_agreement(model, prompts, reference={"block_size": 5}, max_new_tokens=8, batch_size=2)
    assert got.identical == got.prefix == 1.0 and got.first_difference == [None] * 4 and got.num_prompts == 4
    for prompt, text in zip(prompts, got.token_ids, strict=True):
        tiny_models.assert_same_text(model, prompt, text, tiny_models.oracle(model, prompt, 8))


def test_greedy_text_goes_on_behind_an_end_of_sequence():
    model = tiny_models.build("llama_gqa")
    prompt = tiny_models.prompts()[0]
    plain = tiny_models.oracle(model, prompt, 8)
    model.generation_config.eos_token_id = plain[2]
    got = greedy_agreement(model, [prompt], max_new_tokens=8)
    assert len(got.token_ids[0]) == 8 and plain[2] not in got.token_ids[0][3:]


def test_greedy_differences_are_found_where_they_are(monkeypatch):
    texts = iter([[[5, 6, 7, 8], [1, 2, 3, 4]], [[5, 6, 9, 8], [1, 2, 3, 4]]])
    monkeypatch.setattr("hf_paged_eval.agreement.greedy", lambda *args: next(texts))
    got = greedy_agreement(None, [[3], [4]], max_new_tokens=4)
    assert got.first_difference == [2, None] and got.identical == 0.5 and got.prefix == 0.75
    assert got.to_dict()["reference_token_ids"][0] == [5, 6, 9, 8]


def test_a_model_that_cannot_be_packed_generates_alone():
    model, prompts = tiny_models.shared("bloom"), tiny_models.prompts((5, 9))
    got = greedy_agreement(model, prompts, max_new_tokens=4)
    assert got.identical == 1.0
    for prompt, text in zip(prompts, got.token_ids, strict=True):
        tiny_models.assert_same_text(model, prompt, text, tiny_models.oracle(model, prompt, 4))
    with pytest.raises(ValueError, match="at least one prompt"):
        greedy_agreement(model, [])


def test_spans_score_what_follows_a_context():
    model, (one, two, three, four) = tiny_models.shared("llama_gqa"), tiny_models.prompts()
    spans = [(one, two), (three, four[:1]), (four, one)]
    got = score_spans(model, spans, (None, {"block_size": 3}), chunk_size=7, batch_size=2)
    for (context, continuation), found in zip(spans, got, strict=True):
        want = independent(model, [[*context, *continuation]])[0][-len(continuation) :]
        for side in found:
            assert side.logprob.tolist() == pytest.approx(want, rel=1e-5)
    greedy = tiny_models.oracle(model, one, 3)
    ((found,),) = score_spans(model, [(one, greedy)])
    assert found.best.all()
    with pytest.raises(ValueError, match="span 1 needs a context"):
        score_spans(model, [(one, two), ([], two)])


@pytest.mark.demo_model
def test_needles(demo_model):
    model, tokenizer = demo_model
    haystack = hf_paged_eval.load_corpus(tokenizer, max_tokens=400).documents[0]
    got = needle_task(model, tokenizer, haystack, cache_config=FP8, lengths=(96,), depths=(0.0, 1.0), chunk_size=64)
    assert [(one.length, one.depth) for one in got.needles] == [(96, 0.0), (96, 1.0)]
    for one in got.needles:
        prompt, answer = needle_prompt(tokenizer, haystack, 96, one.depth)
        assert len(prompt) == 96
        want = sum(independent(model, [prompt + answer])[0][-len(answer) :])
        assert one.reference_logprob == pytest.approx(want, rel=1e-4) and one.logprob != one.reference_logprob
    # A number that is nowhere cannot be found: the answer's likelihood is the text's doing.
    prompt, answer = needle_prompt(tokenizer, haystack, 96, 1.0)
    without = independent(model, [[*haystack[:60], *prompt[-7:], *answer]])[0][-len(answer) :]
    assert got.needles[1].reference_logprob > sum(without) + 5
    assert got.found == sum(one.found for one in got.needles) / 2
    assert got.to_dict()["needles"][0] == dataclasses.asdict(got.needles[0])


@pytest.mark.demo_model
def test_needle_prompts(demo_model):
    tokenizer, haystack = demo_model[1], list(range(1000, 1300))
    prompt, answer = needle_prompt(tokenizer, haystack, 100, 0.25)
    text, number = tokenizer.decode(prompt), tokenizer.decode(answer).strip()
    assert len(prompt) == 100 and number.isdigit() and text.count(f" is {number}.") == 1
    assert text.endswith(" is") and prompt != needle_prompt(tokenizer, haystack, 100, 0.25, seed=1)[0]
    before = next(at for at, (mine, straw) in enumerate(zip(prompt, haystack, strict=False)) if mine != straw)
    statement = prompt.index(haystack[before], before) - before
    question = max(count for count in range(1, statement) if prompt[-count:] == prompt[before : before + count])
    assert before == round(0.25 * (100 - statement - question))
    for arguments, words in (((20, 0.5), "no room"), ((2000, 0.5), "needs a text of"), ((100, 1.5), "depth must be")):
        with pytest.raises(ValueError, match=words):
            needle_prompt(tokenizer, haystack, *arguments)
    with pytest.raises(ValueError, match="at least one length"):
        needle_task(None, tokenizer, haystack, lengths=())


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    import evaluate

    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder)
        yield evaluate.load(hf_paged_eval.METRIC_PATH, cache_dir=str(folder))


def test_the_metric_of_evaluate(metric):
    model, tokenizer = tiny_models.shared("llama_gqa"), words_tokenizer(WORDS)
    texts = [" ".join(WORDS[:12]), " ".join(WORDS[40:45])]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for bos, documents in (("none", ids), ("once", [[1, *one] for one in ids])):
        got = metric.compute(predictions=texts, model=model, tokenizer=tokenizer, bos=bos, chunk_size=5)
        want = independent(model, documents)
        assert got["bos"] == bos and got["summary"] is None and got["num_tokens"] == sum(map(len, want))
        assert math.log(got["perplexity"]) == pytest.approx(nll(want) / got["num_tokens"], rel=1e-5)
        own = [math.exp(-sum(one) / len(one)) for one in want]
        assert got["perplexities"] == pytest.approx(own, rel=1e-4)
        assert got["mean_perplexity"] == pytest.approx(sum(own) / 2, rel=1e-4)
    assert got["bits_per_byte"] == pytest.approx(nll(want) / math.log(2) / sum(map(len, texts)), rel=1e-5)
    compared = metric.compute(predictions=texts, model=model, tokenizer=tokenizer, cache_config=FP8, reference={})
    assert compared["summary"]["overall"]["kl_mean"] > 0


def test_the_metric_refuses_what_it_cannot_score(metric):
    model, tokenizer = tiny_models.shared("llama_gqa"), words_tokenizer(WORDS)
    with pytest.raises(ValueError, match="text 1 has no token to score with bos='none'"):
        metric.compute(predictions=["word1 word2", "word3"], model=model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="give its tokenizer too"):
        metric.compute(predictions=["word1 word2"], model=model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with its tokenizer, as it lies on a disk."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("llama_gqa").save_pretrained(path)
    words_tokenizer(WORDS).save_pretrained(path)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["eval", "score", *map(str, arguments)])


def test_the_command(folder, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(" ".join(WORDS * 5))
    ran = run("--model", folder, "--kv-cache-dtype", "fp8_e4m3", "--path", text, "--max-length", 100, "--json", out,
              "--cache-config", '{"block_size": 8}', "--generation", 1, "--max-new-tokens", 4)  # fmt: skip
    assert ran.exit_code == 0, ran.output
    for words in ("BOS none", "not measured", "log ratio, 1e-3 nats", "bits per byte", "top-1", "greedy text of 1"):
        assert words in ran.output
    record = json.loads(out.read_text())
    assert record["overall"]["num_tokens"] == 749 and record["buckets"]["512-1k"] is None
    assert record["settings"]["cache_config"]["block_size"] == 8 and record["settings"]["max_length"] == 100
    assert record["overall"]["kl_mean"] > 0 and record["corpus"]["hash"] in ran.output
    assert record["overall"]["ratio"] == pytest.approx(
        record["overall"]["perplexity"] / record["overall"]["reference_perplexity"]
    )
    plain = run("--model", folder, "--path", text, "--no-reference", "--max-tokens", 50, "--bos", "once")
    assert plain.exit_code == 0 and "BOS once" in plain.output and "Divergence" not in plain.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--cache-config", "{"], "--cache-config is no JSON"),
        (["--cache-config", "[1]"], "must be a JSON object"),
        (["--cache-config", '{"kv_cache_dtype": "int8"}', "--kv-cache-dtype", "int8"], "give the format once"),
        (["--cache-config", '{"pages": 1}'], "cache_config has no setting 'pages'"),
        (["--kv-cache-dtype", "fp7"], "fp7"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--dtype", "float17"], "dtype must be one of"),
    ],
)
def test_the_command_refuses_in_one_line(folder, arguments, words):
    ran = run("--model", folder, *arguments)
    assert ran.exit_code == 1 and words in ran.output and "Traceback" not in ran.output


def test_public_names_are_there():
    assert all(hasattr(hf_paged_eval, name) for name in hf_paged_eval.__all__)
    assert hf_paged.PagedCacheConfig.from_any(FP8).kv_cache_dtype == "fp8_e4m3"
