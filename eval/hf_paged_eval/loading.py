"""A model and its tokenizer by name, as every command of the evaluation loads them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import demo_model_path

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def load_model(name: str, dtype: str = "auto", device: str | None = None):
    """(model, tokenizer) in eval mode.

    Args:
        name: "demo", a folder or a Hub name.
        dtype: one of DTYPES; "auto" is what the weights are stored in.
        device: None for a GPU if there is one.
    Raises:
        ValueError: the dtype is unknown.
        OSError: there is no such model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = str(demo_model_path()) if name == "demo" else name
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen)
    model.to(device or default_device()).eval()
    return model, AutoTokenizer.from_pretrained(source)


def default_device() -> str:
    """Where a model runs that is told nothing: on a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
