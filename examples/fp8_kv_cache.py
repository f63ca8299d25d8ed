"""The KV cache in 8 bits, with the demo model: greedy text beside full precision's, and the memory of each.

Runs offline: `python examples/fp8_kv_cache.py`. With a model of your own: `python examples/fp8_kv_cache.py NAME`.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived",
    "The three primary colours are",
]
CALIBRATION = [
    "Paris is the capital of France, and one of the most visited cities of the world.",
    "To make tea, boil fresh water, pour it over the leaves and wait for four minutes.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n",
    "The committee met on Tuesday, 4 March 2014, at 9:30, and agreed on 17 of 23 points.",
    "Why do leaves turn red in autumn? Because the green of chlorophyll fades and other colours show.",
]


def generate(model, tokenizer, **cache_config):
    """New text of each prompt, and the cache that it left."""
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    output = model.generate(
        **batch,
        max_new_tokens=24,
        do_sample=False,
        cache_implementation="paged",
        cache_config=cache_config,
        return_dict_in_generate=True,
    )
    new = output.sequences[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True), output.past_key_values.stats()


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    with tempfile.TemporaryDirectory() as folder:
        scales = Path(folder) / "kv_scales.safetensors"
        fixed = {"kv_cache_dtype": "int8", "kv_scale_granularity": "k:per_channel,v:per_token_head"}
        print("== Fixed scales of keys, measured on a few texts (take some hundred of your own)")
        print("  ", hf_paged.calibrate_kv_scales(model, CALIBRATION, tokenizer=tokenizer, output=scales, **fixed))
        runs = {
            "float32": {},
            "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
            "int8": {"kv_cache_dtype": "int8"},
            "int8, keys per channel": {**fixed, "kv_scales": scales},
        }
        results = {name: generate(model, tokenizer, **settings) for name, settings in runs.items()}

    for i, prompt in enumerate(PROMPTS):
        print(f"== {prompt}")
        for name, (texts, _) in results.items():
            same = " (the same)" if name != "float32" and texts[i] == results["float32"][0][i] else ""
            print(f"   {name:23}{texts[i]!r}{same}")
    print("== Memory of the blocks held, scales included")
    whole = results["float32"][1].bytes_held
    for name, (_, stats) in results.items():
        print(f"   {name:23}{stats.bytes_held / 2**20:6.2f} MiB, {stats.bytes_held / whole:.0%} of float32")
    report = hf_paged.memory_report(model.config, seq_len=2048, dtype="bfloat16", memory="1GiB")
    for plan in report.plans[1:]:
        print(f"   bfloat16 model, {plan.name}: {plan.requests} requests of 2,048 tokens in 1 GiB")


if __name__ == "__main__":
    main()
