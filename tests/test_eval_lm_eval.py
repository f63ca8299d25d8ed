"""The adapter for lm-evaluation-harness: against plain forwards, and against the harness itself where it is installed.

Contract: without the package lm_eval, a stand-in has the two names that the adapter takes from it. It is in the way of
nothing: where the package is there, the same tests use it, and more are run.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import types

import pytest
import tiny_models
from eval_helpers import independent, words_tokenizer
from typer.testing import CliRunner

from hf_paged.cli import app

WORDS = [f"word{number}" for number in range(150)]
INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not INSTALLED, reason="needs lm-eval")


class Hook:
    def __init__(self):
        self.seen = []

    def add_partial(self, kind, arguments, answer):
        self.seen.append((kind, arguments, answer))


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module."""
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED:

            class LM:
                def __init__(self):
                    self.cache_hook = Hook()

            names = {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}}
            names["lm_eval.api.registry"] = {"register_model": lambda name: lambda cls: cls}
            for name, content in names.items():
                module = types.ModuleType(name)
                module.__dict__.update(content)
                patch.setitem(sys.modules, name, module)
        yield importlib.import_module("hf_paged_eval.lm_eval_model")
    sys.modules.pop("hf_paged_eval.lm_eval_model", None)


@pytest.fixture(scope="module")
def model(adapter):
    made = adapter.PagedLM(
        tiny_models.shared("llama_gqa"), words_tokenizer(WORDS), max_length=20, chunk_size=7, block_size=4
    )
    made.cache_hook = Hook()
    return made


def requests(*arguments):
    return [types.SimpleNamespace(args=one) for one in arguments]


def ids(text):
    return words_tokenizer(WORDS)(text)["input_ids"]


def text(start, count):
    return " ".join(WORDS[(start + 7 * at) % 150] for at in range(count))


def test_loglikelihood(model):
    plain, before = tiny_models.shared("llama_gqa"), len(model.cache_hook.seen)
    best = tiny_models.oracle(plain, ids(text(3, 6)), 2)
    greedy = " ".join(WORDS[token - 3] for token in best)
    pairs = [(text(3, 6), " " + text(50, 3)), (text(3, 6), " " + greedy), ("", text(9, 4))]
    pairs += [(text(5, 4) + " ", text(1, 1)), (text(2, 30), " " + text(70, 3))]
    got = model.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, got, strict=True):
        tail = ids(continuation)
        whole = ([1] if not context else ids(context)) + tail
        want = sum(independent(plain, [whole[-21:]])[0][-len(tail) :])  # 20 tokens are seen, the last is not fed
        assert logprob == pytest.approx(want, rel=1e-5)
        assert is_greedy == (continuation == " " + greedy)
    assert [one[:2] for one in model.cache_hook.seen[before:]] == [("loglikelihood", pair) for pair in pairs]


def test_rolling_loglikelihood_uses_the_harness_windows(model):
    plain, texts = tiny_models.shared("llama_gqa"), [text(4, 45), text(90, 7), text(33, 20), text(33, 21), ""]
    got = model.loglikelihood_rolling(requests(*[(one,) for one in texts]), disable_tqdm=True)
    for one, total in zip(texts, got, strict=True):
        tokens, want, done = ids(one) if one else [], 0.0, 0
        while done < len(tokens):
            new = min(20, len(tokens) - done)
            window = [1, *tokens][max(0, done + new - 20) : done + new + 1] if done else [1, *tokens[:new]]
            want += sum(independent(plain, [window])[0][-new:])
            done += new
        assert total == pytest.approx(want, rel=1e-5)


def test_rolling_spans(adapter):
    assert list(adapter.rolling_spans(range(10, 20), 1, 4)) == [
        ([1], [10, 11, 12, 13]),
        ([13], [14, 15, 16, 17]),
        ([15, 16, 17], [18, 19]),  # the last one has a full context
    ]
    assert list(adapter.rolling_spans([], 1, 4)) == []
    assert list(adapter.rolling_spans([5, 6, 7], 1, 4)) == [([1], [5, 6, 7])]


def test_generate_until(model):
    plain, context = tiny_models.shared("llama_gqa"), text(3, 6)
    new = tiny_models.oracle(plain, ids(context), 8)
    want = words_tokenizer(WORDS).decode(new)
    stop = want.split()[3]
    cases = [(context, {"until": [], "max_gen_toks": 8}), (context, {"until": [stop], "max_gen_toks": 8}),
             (context, {"until": stop, "max_new_tokens": 8, "temperature": 0.0, "do_sample": False})]  # fmt: skip
    got = model.generate_until(requests(*cases), disable_tqdm=True)
    assert got[0] == want and got[1] == got[2] == want[: want.index(stop)]
    with pytest.raises(ValueError, match="max_gen_toks=20 leaves no room in 20 tokens"):
        model.generate_until(requests((context, {"max_gen_toks": 20})))


def test_long_contexts_are_cut_on_the_left(model):
    plain = tiny_models.shared("llama_gqa")
    (got,) = model.generate_until(requests((text(3, 40), {"max_gen_toks": 4})), disable_tqdm=True)
    assert got == words_tokenizer(WORDS).decode(tiny_models.oracle(plain, ids(text(3, 40))[-16:], 4))


def test_settings_reach_the_cache(adapter):
    made = adapter.PagedLM(tiny_models.shared("gpt2"), words_tokenizer(WORDS, bos=False), kv_cache_dtype="fp8_e4m3",
                           batch_size="auto", max_batch_size=64)  # fmt: skip
    assert made.cache_config.kv_cache_dtype == "fp8_e4m3" and made.batch_size == 8 and made.max_length == 512
    assert made.prefix_token_id == 2 and made.get_model_info()["cache_config"]["kv_cache_dtype"] == "fp8_e4m3"
    with pytest.raises(ValueError, match="no setting 'pages'"):
        adapter.PagedLM(tiny_models.shared("gpt2"), words_tokenizer(WORDS), pages=3)


def test_bos_where_it_is_asked_for_and_never_twice(adapter):
    def first(tokenizer, **options):
        return adapter.PagedLM(tiny_models.shared("gpt2"), tokenizer, **options)._encode("word1 word2")

    quiet, adds = words_tokenizer(WORDS), words_tokenizer(WORDS, adds_bos=True)
    assert first(quiet) == first(adds, add_bos_token=False) == [4, 5]
    assert first(adds) == first(adds, add_bos_token=True) == first(quiet, add_bos_token=True) == [1, 4, 5]


def test_without_the_package_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "hf_paged_eval.lm_eval_model", raising=False)
    ran = CliRunner().invoke(app, ["lm-eval", "--tasks", "x"])
    assert ran.exit_code == 1 and "pip install 'hf-paged[lm-eval]'" in ran.output


@needs_harness
def test_the_harness_own_model_gives_the_same(model):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    own = HFLM(
        pretrained=tiny_models.shared("llama_gqa"), tokenizer=words_tokenizer(WORDS), max_length=20, batch_size=1
    )

    def instances(kind, arguments):
        return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]

    pairs = instances(
        "loglikelihood", [(text(3, 6), " " + text(50, 3)), ("", text(9, 4)), (text(2, 30), " " + text(7, 3))]
    )
    for mine, right in zip(model.loglikelihood(pairs), own.loglikelihood(pairs), strict=True):
        assert mine[0] == pytest.approx(right[0], rel=1e-5) and mine[1] == right[1]
    rolling = instances("loglikelihood_rolling", [(text(4, 45),), (text(90, 7),), (text(33, 21),)])
    assert model.loglikelihood_rolling(rolling) == pytest.approx(own.loglikelihood_rolling(rolling), rel=1e-5)
    until = instances(
        "generate_until", [(text(3, 6), {"until": [" word5"], "max_gen_toks": 8}), (text(8, 9), {"max_gen_toks": 6})]
    )
    assert model.generate_until(until) == own.generate_until(until)


@needs_harness
def test_the_command(tmp_path):
    """In a process of its own: the harness reads the command line, writes logs and a report."""
    tiny_models.build("llama_gqa").save_pretrained(tmp_path / "model")
    words_tokenizer(WORDS).save_pretrained(tmp_path / "model")
    rows = [{"q": text(3 + at, 5), "a": " " + text(60, 2), "b": " " + text(20, 2), "label": 0} for at in range(3)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.yaml").write_text(
        f"task: words\ndataset_path: json\ntest_split: train\noutput_type: multiple_choice\n"
        f"dataset_kwargs:\n  data_files: {tmp_path}/rows.json\n  cache_dir: {tmp_path}/cache\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: ['{{a}}', '{{b}}']\ndoc_to_target: label\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    arguments = f"pretrained={tmp_path}/model,kv_cache_dtype=fp8_e4m3,block_size=8,dtype=float32"
    command = [sys.executable, "-m", "hf_paged.cli", "lm-eval", "run", "--model", "hf_paged", "--model_args", arguments]
    command += ["--tasks", "words", "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0 and "|words" in ran.stdout, ran.stdout + ran.stderr


@needs_harness
def test_a_task_through_the_harness(model, tmp_path):
    import lm_eval

    rows = [{"q": text(3, 5), "a": " " + text(60, 2), "b": " " + text(20, 2), "label": at % 2} for at in range(4)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "words", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.json"), "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "{{q}}", "doc_to_choice": ["{{a}}", "{{b}}"], "doc_to_target": "label", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    found = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    assert found["results"]["words"]["acc,none"] == 0.5 and found["n-samples"]["words"]["effective"] == 4
    assert lm_eval.api.registry.get_model("hf_paged") is type(model)
