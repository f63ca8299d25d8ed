"""Tiny random-weight models, one per attention feature, and the oracle of every text comparison.

Contract: `build(name)` gives the same float32 model each time, its weights drawn wide (std 0.25) so that any wrong
attention detail changes the argmax. `oracle` is plain transformers generate, one prompt, no padding, greedy;
`assert_same_text` compares token for token and forgives only a near-tie of the oracle (top-2 logit gap < 1e-3).
"""

from __future__ import annotations

import functools

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 199
PROMPT_LENGTHS = (5, 17, 33, 12)
TIE = 1e-3

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GPT_NAMES = {"vocab_size": VOCAB, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TWO_SLIDING_ONE_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

# name -> (model type, settings that differ from BASE)
FAMILIES = {
    "llama_gqa": ("llama", {}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_hd80": ("llama", {"head_dim": 80}),
    "llama_hd96": ("llama", {"head_dim": 96}),
    "llama_hd24": ("llama", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral_swa": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 9,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 9, "layer_types": _TWO_SLIDING_ONE_FULL},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.7, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt2": ("gpt2", {**_GPT_NAMES, "n_embd": 64, "n_positions": 512}),
    "bloom": ("bloom", {**_GPT_NAMES, "hidden_size": 64}),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "intermediate_size": [96] * 6,
            "sliding_window": 8,
            "layer_types": _TWO_SLIDING_ONE_FULL * 2,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}

# Families whose attention reaches the paged operators: bloom computes its own (ALiBi), deepseek_v3 expands latents.
PAGED_FAMILIES = [name for name in FAMILIES if name not in ("bloom", "deepseek_v3")]


def config(name: str, **changes):
    """Config of a family, with settings changed."""
    model_type, settings = FAMILIES[name]
    base = _SPECIAL if model_type in ("gpt2", "bloom") else BASE
    return CONFIG_MAPPING[model_type](**{**base, **settings, **changes})


def build(name: str, attn: str = "eager", seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A new model of a family, without an end-of-sequence token, so that lengths are what a test asks for."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes), dtype=torch.float32, attn_implementation=attn)
    return widen(model, seed).to(dtype)


def widen(model, seed: int = 0):
    """Draw the weights wide, in place, and take the end-of-sequence token away."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
            elif weight_name.endswith("bias") or "sinks" in weight_name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@functools.cache
def shared(name: str):
    """A family's model, one for all tests that leave it as it was."""
    return build(name)


def prompts(lengths=PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    """Random prompts of given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str = "left", width: int | None = None, pad: int = 0):
    """`input_ids` and `attention_mask` of rows padded on one side."""
    width = width or max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = [pad] * (width - len(row))
        real = [1] * len(row)
        ids.append(fill + row if side == "left" else row + fill)
        mask.append([0] * len(fill) + real if side == "left" else real + [0] * len(fill))
    return torch.tensor(ids), torch.tensor(mask)


def oracle(model, prompt: list[int], new: int = 24, **kwargs) -> list[int]:
    """New tokens of plain generate for one prompt alone, greedy, over the default cache."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **kwargs)
    return out[0, len(prompt) :].tolist()


_TEXTS: dict[tuple, list[int]] = {}


def text_alone(name: str, model, prompt, new: int = 24) -> list[int]:
    """The oracle's text of a family's shared model, computed once for all tests.

    A shorter one is the beginning of a longer one: greedy text does not depend on where it will end.
    """
    known = _TEXTS.get((name, tuple(prompt)), [])
    if len(known) < new:
        known = _TEXTS[name, tuple(prompt)] = oracle(model, list(prompt), new)
    return known[:new]


def oracles(name: str, lengths=PROMPT_LENGTHS, new: int = 24) -> list[list[int]]:
    """The oracle's texts for `prompts(lengths)` of a shared model."""
    return [text_alone(name, shared(name), prompt, new) for prompt in prompts(lengths)]


def assert_same_text(model, prompt: list[int], got: list[int], want: list[int]) -> None:
    """Fail unless `got` is `want`, or parts from it where the oracle's two best logits nearly tie."""
    assert len(got) == len(want), f"{len(got)} new tokens, expected {len(want)}"
    step = next((i for i, (mine, right) in enumerate(zip(got, want, strict=True)) if mine != right), None)
    if step is None:
        return
    with torch.no_grad():
        logits = model(torch.tensor([prompt + want[:step]])).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    assert best - second < TIE, f"token {step} is {got[step]}, expected {want[step]} (gap {best - second:.4f})"


def assert_rows_equal_prompts_alone(name: str, sequences: torch.Tensor, rows=None, want=None, width=None) -> None:
    """Each row's new tokens are those of its prompt alone."""
    rows = prompts() if rows is None else rows
    want = oracles(name) if want is None else want
    width = sequences.shape[1] - len(want[0]) if width is None else width
    assert sequences.shape[0] == len(rows)
    for sequence, row, text in zip(sequences[:, width:].tolist(), rows, want, strict=True):
        assert_same_text(shared(name), row, sequence, text)
