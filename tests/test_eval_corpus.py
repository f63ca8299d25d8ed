"""Corpora: conventions said aloud, counts against counts made another way, sources, and hashes."""

import json
import math

import pytest
import tiny_models
from eval_helpers import independent, nll, words_tokenizer

from hf_paged_eval import Corpus, load_corpus, make_corpus, rolling_windows, score

WORDS = [f"word{number}" for number in range(150)]
TEXTS = ["word1 word2  word3", "", "  ", "word4", "word5 word6\nword7 word8"]


def texts_file(tmp_path, name="rows.json", rows=None):
    path = tmp_path / name
    rows = [{"text": text, "title": "t"} for text in TEXTS] if rows is None else rows
    path.write_text(json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_bos_policies():
    tokenizer = words_tokenizer(WORDS)
    none = make_corpus("t", TEXTS, tokenizer, bos="none")
    assert none.documents == [[4, 5, 6], [8, 9, 10, 11]]  # one word alone has nothing to score
    assert none.num_tokens == 5 and none.bos_token_id is None and none.window_bos is None
    once = make_corpus("t", TEXTS, tokenizer, bos="once")
    assert once.documents == [[1, 4, 5, 6], [1, 7], [1, 8, 9, 10, 11]]
    assert once.num_tokens == 8 and once.bos_token_id == 1 and once.window_bos is None
    each = make_corpus("t", TEXTS, tokenizer, bos="each_window")
    assert each.documents == [[4, 5, 6], [7], [8, 9, 10, 11]]
    assert each.num_tokens == 8 and each.window_bos == 1
    assert len({none.hash, once.hash, each.hash}) == 3
    for corpus, said in ((none, "BOS none"), (once, "BOS once, token 1"), (each, "BOS token 1 before each window")):
        assert said in corpus.describe() and corpus.hash in corpus.describe() and "apart" in corpus.describe()


def test_bos_policies_are_what_is_scored():
    model, tokenizer = tiny_models.shared("llama_gqa"), words_tokenizer(WORDS)
    texts = [" ".join(WORDS[at % 150] for at in range(start, start + length)) for start, length in ((3, 30), (50, 9))]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for bos, documents, token in (
        ("none", ids, None),
        ("once", [[1, *one] for one in ids], None),
        ("each_window", ids, 1),
    ):
        corpus = make_corpus("t", texts, tokenizer, bos=bos)
        for max_length, stride in ((None, None), (8, 5)):
            got = score(model, corpus, max_length=max_length, stride=stride)
            assert got.nll_sum == pytest.approx(nll(independent(model, documents, max_length, stride, token)), rel=1e-5)
            assert got.num_tokens == corpus.num_tokens == (37 if bos == "none" else 39)
    # One window a document: both put one BOS there.
    once, each = (score(model, make_corpus("t", texts, tokenizer, bos=bos)) for bos in ("once", "each_window"))
    assert once.nll_sum == pytest.approx(each.nll_sum, rel=1e-6)


@pytest.mark.parametrize("bos", ["auto", "none", "once", "each_window"])
def test_a_tokenizer_without_bos(bos, recwarn):
    corpus = make_corpus("t", TEXTS, words_tokenizer(WORDS, bos=False), bos=bos)
    assert corpus.bos_policy == "none" and corpus.num_tokens == 5 and "BOS none" in corpus.describe()
    assert any("has no BOS token" in str(one.message) for one in recwarn) == (bos in ("once", "each_window"))


def test_auto_does_what_the_tokenizer_does():
    assert make_corpus("t", TEXTS, words_tokenizer(WORDS)).bos_policy == "none"
    adds = make_corpus("t", TEXTS, words_tokenizer(WORDS, adds_bos=True))
    assert adds.bos_policy == "once" and adds.documents[0] == [1, 4, 5, 6]  # once, not twice


def test_documents_apart_or_joined():
    tokenizer = words_tokenizer(WORDS)
    joined = make_corpus("t", TEXTS, tokenizer, documents="joined", bos="none")
    assert joined.documents == [[4, 5, 6, 7, 8, 9, 10, 11]] and joined.num_tokens == 7
    assert joined.texts == ["word1 word2  word3\n\nword4\n\nword5 word6\nword7 word8"]
    assert "1 document joined" in joined.describe()


@pytest.mark.demo_model
@pytest.mark.parametrize("bos", ["none", "once", "each_window"])
def test_words_bytes_and_tokens_are_those_of_the_scored_text(demo_model, bos):
    tokenizer = demo_model[1]
    texts = ["Grüße aus Köln, 12 °C.", "def f(x):\n    return x ** 2  # square\n", "in 日本語も 少し"]
    corpus = make_corpus("t", texts, tokenizer, bos=bos)
    scored = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first = len(tokenizer.decode(ids[:1])) if bos == "none" else 0
        scored.append(text[first:])
    assert corpus.texts == texts
    assert corpus.num_bytes == sum(len(text.encode()) for text in scored)
    assert corpus.num_words == sum(len(text.split()) for text in scored)
    result = score(demo_model[0], corpus, chunk_size=32)
    units = corpus.normalise(result)
    total = -sum(sum(part) for part in result.token_logprobs)
    assert units.token_perplexity == pytest.approx(math.exp(total / corpus.num_tokens)) == result.perplexity
    assert units.word_perplexity == pytest.approx(math.exp(total / sum(len(text.split()) for text in scored)))
    assert units.byte_perplexity == pytest.approx(2 ** (total / math.log(2) / sum(len(t.encode()) for t in scored)))
    assert units.bits_per_byte == pytest.approx(math.log2(units.byte_perplexity))
    with pytest.raises(ValueError, match="the result has"):
        make_corpus("t", texts[:1], tokenizer, bos=bos).normalise(result)


def test_a_tokenizer_without_offsets_counts_the_same():
    class Slow:
        is_fast, bos_token_id = False, None

        def __init__(self, fast):
            self.fast = fast

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": self.fast(text, add_special_tokens=add_special_tokens)["input_ids"]}

        def decode(self, ids):
            return self.fast.decode(ids) + (" " if len(ids) else "")

    fast = words_tokenizer(WORDS, bos=False)
    text = "word1 word2 word3 word4"
    quick, slow = (make_corpus("t", [text], one, bos="none", max_tokens=2) for one in (fast, Slow(fast)))
    assert (slow.documents, slow.num_bytes, slow.num_words) == (quick.documents, quick.num_bytes, quick.num_words)


def test_max_tokens_counts_what_is_scored():
    tokenizer = words_tokenizer(WORDS)
    for bos in ("none", "once", "each_window"):
        for count in range(1, 9):
            corpus = make_corpus("t", TEXTS, tokenizer, bos=bos, max_tokens=count)
            assert corpus.num_tokens == min(count, 5 if bos == "none" else 8)
            windows = [
                rolling_windows(len(one), 3, None, int(corpus.window_bos is not None)) for one in corpus.documents
            ]
            assert sum(w.end - w.first_scored for ws in windows for w in ws) == corpus.num_tokens
    assert corpus.texts[0] == "word1 word2  word3"
    assert make_corpus("t", TEXTS, tokenizer, bos="none", max_tokens=1).texts == ["word1 word2  "]


@pytest.mark.demo_model
def test_the_embedded_corpus(demo_model):
    tokenizer = demo_model[1]
    corpus = load_corpus(tokenizer, max_tokens=20_000)
    lengths = list(map(len, corpus.documents))
    assert corpus.num_tokens == 20_000 and corpus.name == "python-topics" and corpus.licence == "PSF-2.0"
    assert 8000 <= lengths[0] == max(lengths) <= demo_model[0].config.max_position_embeddings
    assert len(lengths) > 5 and len(set(lengths)) > 5  # ragged
    assert (
        corpus.hash == load_corpus(tokenizer, max_tokens=20_000).hash != load_corpus(tokenizer, max_tokens=19_999).hash
    )
    short = load_corpus(tokenizer, max_tokens=300)
    assert short.documents == [corpus.documents[0][:301]] and corpus.texts[0].startswith(short.texts[0])
    with_bos = load_corpus(tokenizer, max_tokens=9000, bos="once")
    assert len(with_bos.documents[0]) == lengths[0] and with_bos.documents[0][0] == tokenizer.bos_token_id
    everything = load_corpus(tokenizer)
    assert everything.num_tokens > 80_000 and max(map(len, everything.documents)) == lengths[0]


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "txt"])
def test_local_files(tmp_path, kind):
    tokenizer, rows = words_tokenizer(WORDS), [{"text": text, "title": "t"} for text in TEXTS]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "txt":
        path.write_text("\n".join(TEXTS), encoding="utf-8")
    else:
        texts_file(tmp_path, path.name, rows)
    corpus = load_corpus(tokenizer, path=path, bos="none")
    want = [[4, 5, 6, 7, 8, 9, 10, 11]] if kind == "txt" else [[4, 5, 6], [8, 9, 10, 11]]
    assert corpus.documents == want and corpus.name == path.name


def test_a_column_of_lists_and_a_list_of_texts(tmp_path):
    tokenizer = words_tokenizer(WORDS)
    for rows in (TEXTS, {"text": TEXTS}):
        assert load_corpus(tokenizer, path=texts_file(tmp_path, rows=rows), bos="none").num_tokens == 5
    other = texts_file(tmp_path, rows=[{"body": "word1 word2"}])
    assert load_corpus(tokenizer, path=other, column="body", bos="none").documents == [[4, 5]]


def test_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus(words_tokenizer(WORDS), "wikitext", "wikitext-2-raw-v1", bos="none", documents="joined")
    assert asked == [(("wikitext", "wikitext-2-raw-v1"), {"split": "test"})]
    assert corpus.name == "wikitext/wikitext-2-raw-v1/test" and corpus.num_tokens == 7


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(dataset="a", path="b.txt"), "either dataset='a' or path='b.txt'"),
        (dict(split="train"), "need a dataset"),
        (dict(documents="merged"), "documents must be 'apart' or 'joined', got 'merged'"),
        (dict(bos="always"), "bos must be one of none, once, each_window, auto, got 'always'"),
        (dict(max_tokens=0), "max_tokens must be an integer >= 1"),
        (dict(path="nowhere.txt"), "there is no file nowhere.txt"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        load_corpus(words_tokenizer(WORDS), **arguments)


def test_files_without_text_are_refused(tmp_path):
    tokenizer = words_tokenizer(WORDS)
    with pytest.raises(ValueError, match="row 0 has no text in column 'body'; it has text, title"):
        load_corpus(tokenizer, path=texts_file(tmp_path), column="body")
    with pytest.raises(ValueError, match="has no text to score"):
        load_corpus(tokenizer, path=texts_file(tmp_path, rows=[{"text": " "}]))
    (tmp_path / "a.csv").write_text("text\nword1 word2")
    with pytest.raises(ValueError, match="must end in .txt, .json, .jsonl or .parquet, got 'a.csv'"):
        load_corpus(tokenizer, path=tmp_path / "a.csv")


def test_the_hash_is_of_tokens_and_policy():
    made = dict(name="a", texts=["x"], num_words=1, num_bytes=1, documents_are="apart")
    one = Corpus(documents=[[3, 4]], bos_policy="none", bos_token_id=None, **made)
    same = Corpus(documents=[[3, 4]], bos_policy="none", bos_token_id=None, **{**made, "name": "b"})
    apart = Corpus(documents=[[3], [4]], bos_policy="none", bos_token_id=None, **made)
    bos = Corpus(documents=[[3, 4]], bos_policy="each_window", bos_token_id=1, **made)
    assert one.hash == same.hash and len({one.hash, apart.hash, bos.hash}) == 3
