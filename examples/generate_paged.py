"""generate() from a KV cache in blocks, with the demo model: a batch, a conversation, and a prompt told once.

Runs offline: `python examples/generate_paged.py`. With a model of your own: `python examples/generate_paged.py NAME`.
"""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged  # makes cache_implementation="paged" known to transformers


def load(name: str | None):
    if name is None:
        name = hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(name, padding_side="left")


def main() -> None:
    model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else None)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    settings = {"max_new_tokens": 16, "do_sample": False}

    print("== A batch of unequal prompts: nothing is kept for the padding")
    prompts = [
        "The capital of France is",
        "Water",
        "A long time ago, in a house by the sea, there lived an old man who",
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    paged = model.generate(
        **batch, **settings, cache_implementation="paged", cache_config={"block_size": 8}, return_dict_in_generate=True
    )
    for text in tokenizer.batch_decode(paged.sequences, skip_special_tokens=True):
        print("  ", repr(text))
    stats = paged.past_key_values.stats()
    print(f"   {stats.blocks_held} blocks of 8 tokens, {stats.waste:.0%} of them empty")
    for prompt, row in zip(prompts, paged.sequences, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        plain = model.generate(**alone, **settings)[0, alone["input_ids"].shape[1] :]
        assert torch.equal(row[batch["input_ids"].shape[1] :][: len(plain)], plain), prompt
    print("   Each row equals plain generate of its prompt alone.")

    print("== One cache over two turns: the second computes only what is new")
    cache = hf_paged.PagedCache(model.config)
    text = tokenizer("My favourite colours are", return_tensors="pt")["input_ids"]
    for said in (" And my favourite animals are", None):
        text = model.generate(text, **settings, past_key_values=cache)
        print("  ", cache.get_seq_length(), "tokens cached:", repr(tokenizer.decode(text[0], skip_special_tokens=True)))
        if said:
            text = torch.cat([text, tokenizer(said, return_tensors="pt", add_special_tokens=False)["input_ids"]], dim=1)

    print("== One prompt, two continuations: the copy shares every block until one side writes")
    cache = hf_paged.PagedCache(model.config)
    start = tokenizer("Once upon a time there was a", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model(start[:, :-1], past_key_values=cache)
    for ending in (" cat", " dog"):
        branch = copy.deepcopy(cache)
        more = tokenizer(ending, return_tensors="pt", add_special_tokens=False)["input_ids"]
        text = model.generate(torch.cat([start, more], dim=1), **settings, past_key_values=branch)
        print("  ", repr(tokenizer.decode(text[0], skip_special_tokens=True)))


if __name__ == "__main__":
    main()
