"""A small language model trained in about a minute on text that Python brings along.

Contract: a second model for gates, tests and examples that needs no download. The same Python, torch and number of
threads give the same weights; others give about as good ones. A folder appears whole, by one rename. The model knows
windows of CONTEXT tokens: score it with `max_length` no larger.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CONTEXT, BATCH, STEPS = 512, 256, 8, 240
PEAK_RATE, WARM_UP = 4e-3, 20
BOS, EOS = "<s>", "</s>"


def train_small_model(
    folder: str | Path, steps: int = STEPS, seed: int = 0, progress_bar: bool = False, texts: list[str] | None = None
) -> float:
    """Train tokenizer and model and save them so that `from_pretrained` loads them.

    Args:
        folder: to be made.
        steps: of 8 windows of 256 tokens.
        seed: of weights and order.
        progress_bar: on stderr.
        texts: what to learn; None for Python's own help texts.
    Returns:
        The mean loss of the last tenth of the steps, nats a token.
    Raises:
        ValueError: the folder exists, or the text is shorter than a window.
        RuntimeError: training did not work: the loss is not that of a model that has learned anything.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already")
    texts = help_texts() if texts is None else texts
    tokenizer = _tokenizer(texts)
    ids = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"])
    if len(ids) <= CONTEXT:
        raise ValueError(f"the text has {len(ids)} tokens, a window needs more than {CONTEXT}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(tokenizer))
        losses = _train(model, ids, steps, progress_bar)
    last = losses[-max(1, len(losses) // 10) :]
    loss = sum(last) / len(last)
    if not math.isfinite(loss):
        raise RuntimeError(f"training ended with a loss of {loss}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return loss


def help_texts() -> list[str]:
    """The language reference as Python's own help shows it (PSF licence)."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be written in it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # No length of its own: corpora are cut into windows by who scores them.
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)


def _config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _train(model: LlamaForCausalLM, ids: torch.Tensor, steps: int, progress_bar: bool) -> list[float]:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    rest = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    warm_up = min(WARM_UP, max(1, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))),
    )
    model.train()
    losses = []
    with tqdm(total=steps, desc="training a small model", unit="step", disable=None if progress_bar else True) as bar:
        for batch in _batches(ids, steps):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    model.eval()
    return losses


def _batches(ids: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Windows from anywhere in the text."""
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - CONTEXT, (BATCH,))
        yield torch.stack([ids[start : start + CONTEXT] for start in starts])
