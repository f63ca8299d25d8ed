"""What the tests of the evaluation compare with: windows and sums worked out another way, and small tokenizers.

Contract: `independent` never touches a cache, a batch or the code under test: one plain forward of transformers for
each window, log_softmax in float64. Its windows follow the guide of transformers (a loop that moves by the stride and
scores what is new), not `rolling_windows`.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def independent(model, documents, max_length=None, stride=None, bos=None) -> list[list[float]]:
    """Log-probabilities of the tokens that are scored, one list a document."""
    return [_document(model, list(document), max_length, stride, bos) for document in documents]


def _document(model, tokens, max_length, stride, bos):
    before = [] if bos is None else [bos]
    if max_length is None:
        return _tail(model, before + tokens, len(tokens) - (bos is None))
    size = max_length - len(before)
    stride = stride or size
    found, done = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + size, len(tokens))
        new = end - max(done, begin)
        if begin == 0:
            new -= bos is None
        # Windows that touch have no context in common: the token before lends itself.
        lent = [tokens[begin - 1]] if begin and begin == done and bos is None else []
        found += _tail(model, before + lent + tokens[begin:end], new)
        done = end
        if end == len(tokens):
            break
    return found


def _tail(model, window, count):
    """Log-probabilities of the last `count` tokens of a window, by itself."""
    if count <= 0:
        return []
    with torch.no_grad():
        logits = model(torch.tensor([window], device=model.device), use_cache=False).logits[0].double()
    scores = logits.log_softmax(dim=-1)
    return [float(scores[at - 1, window[at]]) for at in range(len(window) - count, len(window))]


def nll(logprobs) -> float:
    return -sum(sum(part) for part in logprobs)


def words_tokenizer(words, bos: bool = True, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a word; ids 0 unknown, 1 BOS (where there is one), 2 EOS, then the words."""
    names = ["<unk>", "<s>", "</s>", *words]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", **special)
