"""The text that is scored: from Python itself, from a file, or from `datasets`; tokens, counts, conventions, a hash.

Contract: a `Corpus` says all that makes its number comparable: which tokens, documents apart or joined, what stands
before them (BOS), how many words and bytes the scored tokens make up. `hash` covers the token ids and the BOS policy:
equal hashes mean the same work for the model. No torch in this file.

The embedded default is the language reference that every Python carries (`pydoc_data.topics`; under the PSF licence,
read from the running Python and not copied here). Its text differs between versions of Python, and so does the hash.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .corpus_sources import embedded_texts, from_datasets, from_file
from .metrics import Normalised, normalise

BOS_POLICIES = ("none", "once", "each_window")
LONGEST_DOCUMENT = 8192  # tokens of the embedded corpus' longest documents: what its demo model has positions for
EMBEDDED = "python-topics"


@dataclass(frozen=True)
class Corpus:
    """Documents of token ids, and what is known of their text.

    Attributes:
        name: where it comes from.
        documents: token ids, as `score` takes them; with the policy "once" each begins with BOS.
        texts: the text of each document, as far as its tokens go.
        num_words, num_bytes: of the scored text: what whitespace separates, and UTF-8 bytes. Without BOS a document's
            first token is not scored, and not counted.
        bos_policy: "none": nothing is put before a document, whose first token is context only. "once": BOS before
            each document. "each_window": BOS before each window, which `window_bos` has `score` do.
        bos_token_id: the token; None with "none".
        documents_are: "apart" or "joined".
        hash: of the token ids and the BOS policy, 16 hexadecimal digits.
        licence: of the text, where it is known.
    """

    name: str
    documents: list[list[int]]
    texts: list[str]
    num_words: int
    num_bytes: int
    bos_policy: str
    bos_token_id: int | None
    documents_are: str
    licence: str | None = None
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        said = json.dumps([self.bos_policy, self.bos_token_id, self.documents], separators=(",", ":"))
        object.__setattr__(self, "hash", hashlib.sha256(said.encode()).hexdigest()[:16])

    @property
    def window_bos(self) -> int | None:
        """The token that `score` is to put before every window, or None."""
        return self.bos_token_id if self.bos_policy == "each_window" else None

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored, in any windows."""
        unscored = 0 if self.bos_policy == "each_window" else 1
        return sum(max(0, len(document) - unscored) for document in self.documents)

    def normalise(self, result) -> Normalised:
        """Perplexity by token, word and byte of what `score` found of this corpus.

        Raises:
            ValueError: the result is of other tokens.
        """
        if result.num_tokens != self.num_tokens:
            raise ValueError(f"the result has {result.num_tokens} tokens, this corpus {self.num_tokens}")
        return normalise(result.nll_sum, result.num_tokens, self.num_words, self.num_bytes)

    def describe(self) -> str:
        """One line with everything that a number from this corpus depends on."""
        count = len(self.documents)
        bos = {
            "none": "none (a document's first token is context only)",
            "once": f"once, token {self.bos_token_id} before each document",
            "each_window": f"token {self.bos_token_id} before each window",
        }[self.bos_policy]
        return (
            f"{self.name}: {count} document{'s'[: count != 1]} {self.documents_are}, {self.num_tokens:,} scored "
            f"tokens, {self.num_words:,} words, {self.num_bytes:,} bytes; BOS {bos}; hash {self.hash}"
        )

    def __repr__(self) -> str:
        return f"Corpus({self.describe()})"


def load_corpus(
    tokenizer,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    column: str = "text",
    path: str | Path | None = None,
    documents: str = "apart",
    bos: str = "auto",
    max_tokens: int | None = None,
) -> Corpus:
    """Read a corpus and make tokens of it.

    Args:
        tokenizer: of transformers.
        dataset, subset, split: of `datasets`; the split is "test" if none is given.
        column: the column with the text, also of json and parquet files.
        path: instead, a local .txt (one document), .json, .jsonl or .parquet file.
        documents: "apart": each row a document, empty ones left out. "joined": all of them one, with an empty line
            between two.
        bos: "none", "once", "each_window" (see `Corpus.bos_policy`), or "auto": "once" where the tokenizer itself
            begins a text with BOS, else "none". A tokenizer without BOS makes each of them "none", with a warning
            where BOS was asked for.
        max_tokens: stop after so many scored tokens; the last document is cut.
    Raises:
        ValueError: an argument is wrong, or there is no text.
        OSError: a file cannot be read.
    """
    if dataset is not None and path is not None:
        raise ValueError(f"give either dataset={dataset!r} or path={str(path)!r}")
    if dataset is None and (subset is not None or split is not None):
        raise ValueError("subset and split need a dataset")
    check_arguments(documents, max_tokens)
    policy, bos_token_id = bos_policy(tokenizer, bos)
    longest, licence = None, None
    if dataset is not None:
        name = "/".join(part for part in (dataset, subset, split or "test") if part)
        texts: Iterable[str] = from_datasets(dataset, subset, split or "test", column)
    elif path is not None:
        name, texts = Path(path).name, from_file(Path(path), column)
    else:
        name, texts, longest, licence = EMBEDDED, embedded_texts(), LONGEST_DOCUMENT, "PSF-2.0"
    return _Builder(tokenizer, policy, bos_token_id, max_tokens, longest).build(name, texts, documents, licence)


def make_corpus(
    name: str,
    texts: Iterable[str],
    tokenizer,
    *,
    documents: str = "apart",
    bos: str = "auto",
    max_tokens: int | None = None,
    keep_empty: bool = False,
) -> Corpus:
    """A corpus of texts that the caller has; arguments as `load_corpus` takes them.

    Args:
        keep_empty: keep texts without a token to score, so that the documents stay in step with the texts.
    """
    check_arguments(documents, max_tokens)
    policy, bos_token_id = bos_policy(tokenizer, bos)
    builder = _Builder(tokenizer, policy, bos_token_id, max_tokens, keep_empty=keep_empty)
    return builder.build(name, texts, documents, None)


def check_arguments(documents: str, max_tokens: int | None) -> None:
    """Raise ValueError for what is no way of keeping documents, or no count."""
    if documents not in ("apart", "joined"):
        raise ValueError(f"documents must be 'apart' or 'joined', got {documents!r}")
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens must be an integer >= 1 or None, got {max_tokens!r}")


class _Builder:
    """Makes a Corpus of texts, up to a number of scored tokens."""

    def __init__(
        self,
        tokenizer,
        policy: str,
        bos_token_id: int | None,
        max_tokens: int | None,
        longest: int | None = None,
        keep_empty: bool = False,
    ) -> None:
        self._tokenizer, self._policy, self._bos, self._keep_empty = tokenizer, policy, bos_token_id, keep_empty
        self._left = max_tokens
        self._longest = None if longest is None else longest - (policy != "none")
        self._unscored = 1 if policy == "none" else 0
        self._documents: list[list[int]] = []
        self._texts: list[str] = []
        self._words = self._bytes = 0

    def build(self, name: str, texts: Iterable[str], documents: str, licence: str | None) -> Corpus:
        if not self._keep_empty:
            texts = (text for text in texts if text.strip())
        if documents == "joined":
            texts = ["\n\n".join(texts)]
        for piece in _pieces(texts, self._tokenizer, self._longest):
            if self._left is not None and self._left <= 0:
                break
            self._take(piece)
        if not self._words:
            raise ValueError(f"corpus {name!r} has no text to score")
        return Corpus(
            name,
            self._documents,
            self._texts,
            self._words,
            self._bytes,
            self._policy,
            self._bos,
            documents,
            licence,
        )

    def _take(self, piece: _Piece) -> None:
        unscored, count = self._unscored, len(piece.ids)
        if self._left is not None:
            count = min(count, self._left + unscored)
        if count <= unscored and not self._keep_empty:
            return
        ids = list(piece.ids[:count])
        self._documents.append([self._bos, *ids] if self._policy == "once" else ids)
        self._texts.append(piece.text[piece.place(0) : piece.place(count)])
        scored = max(0, count - unscored)
        if scored:
            text = piece.text[piece.place(unscored) : piece.place(count)]
            self._words += len(text.split())
            self._bytes += len(text.encode("utf-8", "surrogatepass"))
        if self._left is not None:
            self._left -= scored


class _Piece(NamedTuple):
    """Tokens of a text, and `place(i)`: where in the text token i begins; one more for where the last one ends."""

    ids: Sequence[int]
    text: str
    place: Callable[[int], int]


def _pieces(texts: Iterable[str], tokenizer, longest: int | None) -> Iterator[_Piece]:
    """The texts as tokens, each in pieces of at most `longest`; what is behind a text's first piece comes last."""
    later: list[_Piece] = []
    for text in texts:
        whole = _tokenize(tokenizer, text)
        step = longest or max(1, len(whole.ids))
        for at in range(0, max(1, len(whole.ids)), step):
            piece = _Piece(whole.ids[at : at + step], text, lambda i, at=at, place=whole.place: place(at + i))
            if at:
                later.append(piece)
            else:
                yield piece
    yield from later


def _tokenize(tokenizer, text: str) -> _Piece:
    fast = bool(getattr(tokenizer, "is_fast", False))
    # verbose=False: no warning that the text is longer than some context.
    options = {"return_offsets_mapping": True} if fast else {}
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, **options)
    ids = list(encoded["input_ids"])
    if fast:
        places = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        return _Piece(ids, text, places.__getitem__)

    def place(i: int) -> int:  # as far as the tokens before it reach when they are decoded
        return 0 if i == 0 else len(text) if i == len(ids) else min(len(text), len(tokenizer.decode(ids[:i])))

    return _Piece(ids, text, place)


def bos_policy(tokenizer, asked: str) -> tuple[str, int | None]:
    """The policy that is used, and the token."""
    if asked not in (*BOS_POLICIES, "auto"):
        raise ValueError(f"bos must be one of {', '.join(BOS_POLICIES)}, auto, got {asked!r}")
    token = getattr(tokenizer, "bos_token_id", None)
    if asked == "none":
        return "none", None
    if token is None:
        if asked != "auto":
            warnings.warn(f"bos={asked!r}: this tokenizer has no BOS token, the policy is 'none'", stacklevel=3)
        return "none", None
    if asked == "auto":
        begins = list(tokenizer("a")["input_ids"])[:1] == [token]
        return ("once", token) if begins else ("none", None)
    return asked, token
