"""Tiny configs of model families beyond tiny_models, with what is special about each.

Contract: `build_more(name)` gives a float32 model with wide random weights, as tiny_models does; `KINDS` says whether
it is decoder-only text, encoder-decoder or vision-language.
"""

from __future__ import annotations

import functools

import torch
from tiny_models import BASE, VOCAB, padded, widen
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

_LLAMA = {**BASE, "num_hidden_layers": 2}
_MHA = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {**_SPECIAL, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": False}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SEQ2SEQ = {**_SPECIAL, "d_model": 32, "decoder_start_token_id": 0, "tie_word_embeddings": False}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_FOUR_LAYERS = {"num_hidden_layers": 4}

# name -> (model type, settings, what is special)
MORE = {
    "mixtral": ("mixtral", {**_LLAMA, **_MOE, "sliding_window": 8}, "experts, sliding window"),
    "phi": ("phi", {**_LLAMA, "num_key_value_heads": 4}, "partial rotary"),
    "phi3": ("phi3", {**_LLAMA, "sliding_window": 8}, "fused QKV, sliding window"),
    "olmo2": ("olmo2", _LLAMA, "norms after attention"),
    "cohere": ("cohere", {**_LLAMA, "logit_scale": 1.0}, "parallel blocks"),
    "cohere2": (
        "cohere2",
        {**_LLAMA, **_FOUR_LAYERS, "sliding_window": 8, "logit_scale": 1.0},
        "three sliding layers to one full, without rotary",
    ),
    "starcoder2": ("starcoder2", {**_LLAMA, "sliding_window": 8}, "biases, sliding window"),
    "smollm3": ("smollm3", {**_LLAMA, **_FOUR_LAYERS}, "rotary left out in some layers"),
    "exaone4": ("exaone4", {**_LLAMA, **_FOUR_LAYERS, "sliding_window": 8}, "hybrid windows"),
    "glm4": ("glm4", {**_LLAMA, "head_dim": 16}, "interleaved rotary"),
    "opt": (
        "opt",
        {**_SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96}
        | {"max_position_embeddings": 512, "word_embed_proj_dim": 64, "tie_word_embeddings": False},
        "learned positions",
    ),
    "gpt_neox": ("gpt_neox", _MHA, "parallel blocks"),
    "gpt_neo": (
        "gpt_neo",
        {**_SPECIAL, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 512},
        "own attention, local layers",
    ),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}, "own attention"),
    "gpt_bigcode": ("gpt_bigcode", _GPT, "multi-query"),
    "falcon": (
        "falcon",
        {**_MHA, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96},
        "own attention",
    ),
    "falcon_alibi": ("falcon", {**_MHA, "alibi": True, "multi_query": False, "ffn_hidden_size": 96}, "ALiBi"),
    "mpt": (
        "mpt",
        {**_SPECIAL, "d_model": 64, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 512},
        "ALiBi",
    ),
    "xglm": (
        "xglm",
        {**_SPECIAL, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "tie_word_embeddings": False},
        "own attention, positions with an offset",
    ),
    "biogpt": ("biogpt", {**_MHA, "hidden_dropout_prob": 0.0}, "positions from the mask"),
    "stablelm": ("stablelm", _LLAMA, "partial rotary"),
    "nemotron": ("nemotron", {**_LLAMA, "head_dim": 16}, "squared ReLU, partial rotary"),
    "persimmon": ("persimmon", _MHA, "partial rotary, norms on Q and K"),
    "diffllama": ("diffllama", _LLAMA, "transforms V after the cache"),
    "jetmoe": (
        "jetmoe",
        {**_LLAMA, **_MOE, "num_key_value_heads": 2, "kv_channels": 16, "num_attention_heads": 4},
        "transforms K and V after the cache",
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LLAMA,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
        "MLA: latents in the cache",
    ),
    "llama4": (
        "llama4_text",
        {
            **_LLAMA,
            **_FOUR_LAYERS,
            "head_dim": 16,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "moe_layers": [1, 3],
            "interleave_moe_layer_step": 2,
        },
        "chunked attention, positions tuned by the cache's length",
    ),
    "minimax": (
        "minimax",
        {**_LLAMA, **_MOE, "layer_types": ["linear_attention", "full_attention"], "block_size": 8, "head_dim": 16},
        "linear attention in a cache of its own",
    ),
    "lfm2": (
        "lfm2",
        {**_LLAMA, **_FOUR_LAYERS, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
        | {"conv_L_cache": 3, "block_multiple_of": 16},
        "short convolutions between attention layers",
    ),
    "bamba": (
        "bamba",
        {**_LLAMA, **_MAMBA, **_FOUR_LAYERS, "attn_layer_indices": [1, 3]},
        "mamba between attention layers",
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_LLAMA, **_MAMBA, **_MOE, **_FOUR_LAYERS, "layer_types": ["mamba", "attention"] * 2}
        | {"shared_intermediate_size": 32, "attention_multiplier": 0.25},
        "mamba and experts",
    ),
    "mamba": (
        "mamba",
        {**_SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False},
        "no attention at all",
    ),
    "t5": (
        "t5",
        {**_SEQ2SEQ, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        "encoder-decoder, relative position bias",
    ),
    "bart": (
        "bart",
        {**_SEQ2SEQ, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128},
        "encoder-decoder",
    ),
}

_SEQ2SEQ_TYPES = ("t5", "bart")

_IMAGE = 198  # the token that stands for a piece of an image
_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16}

# name -> (model type, settings, what is special)
VISION = {
    "llava": (
        "llava",
        {
            "vision_config": {"model_type": "clip_vision_model", **_CLIP, "patch_size": 8},
            "text_config": {"model_type": "llama", **_LLAMA},
            "image_token_index": _IMAGE,
            "image_token_id": _IMAGE,
            "vision_feature_layer": -1,
        },
        "vision-language, causal over images",
    ),
    "gemma3_vl": (
        "gemma3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_CLIP, "patch_size": 4},
            "text_config": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 16, "sliding_window": 8}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            "mm_tokens_per_image": 4,
            "image_token_id": _IMAGE,
            "boi_token_id": 196,
            "eoi_token_id": 197,
        },
        "vision-language, bidirectional within an image",
    ),
}


def is_encoder_decoder(name: str) -> bool:
    return MORE[name][0] in _SEQ2SEQ_TYPES


def build_more(name: str, attn: str | None = None, **changes):
    """A new model of a family, without an end-of-sequence token."""
    model_type, settings, _ = MORE[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**settings, **changes})
    auto = AutoModelForSeq2SeqLM if is_encoder_decoder(name) else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, **({"attn_implementation": attn} if attn else {}))
    return widen(model)


@functools.cache
def shared_more(name: str):
    """A family's model, one for all tests that leave it as it was."""
    return build_more(name)


def build_vision(name: str):
    """A tiny vision-language model and the inputs of two rows, left-padded, each with one image."""
    model_type, settings, _ = VISION[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**settings)
    model = widen(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    generator = torch.Generator().manual_seed(3)
    rows = [[1, 5, *[_IMAGE] * 4, 9, 11, 7], [1, *[_IMAGE] * 4, 8, 4, 6, 12, 3, 14]]
    ids, mask = padded(rows)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    if model_type == "gemma3":
        inputs["token_type_ids"] = (ids == _IMAGE).long()
    return model, inputs
