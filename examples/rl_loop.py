"""Training between rollouts: prefixes are shared within a round and never across a change of the weights.

A tiny model, made here, learns to answer with a token that a reward likes. Each round samples several answers to
prompts that begin alike through generate(cache_implementation="paged"), takes a few steps of policy gradient (Williams
1992) with fused AdamW, which leaves no version of the weights behind, and then compares what paged generate says with
plain generate of the same weights. Nobody tells the cache that the weights changed.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged  # makes cache_implementation="paged" known to transformers

ROUNDS, STEPS, ANSWERS, NEW = 5, 3, 8, 12
LIKED = 7


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # wide, so that texts are no mere repetitions
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(model, optimizer, texts: torch.Tensor, prompt_length: int) -> float:
    """A step of policy gradient on `texts [rows, tokens]`; returns the mean reward."""
    rewards = (texts[:, prompt_length:] == LIKED).float().mean(dim=1)
    advantages = rewards - rewards.mean()
    logits = model(texts[:, :-1]).logits[:, prompt_length - 1 :]
    chosen = logits.log_softmax(-1).gather(2, texts[:, prompt_length:, None])[..., 0]
    loss = -(advantages[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    system = torch.randint(3, 64, (48,), generator=generator)  # what all prompts begin with
    tasks = torch.randint(3, 64, (4, 5), generator=generator)
    prompts = torch.cat([system.expand(4, -1), tasks], dim=1)
    length = prompts.shape[1]
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 8}}
    sampled = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": ANSWERS, "top_k": 0}
    greedy = {"do_sample": False, "max_new_tokens": NEW}
    mask = torch.ones_like(prompts)

    print(f"== {ROUNDS} rounds: {len(prompts)} prompts of {length} tokens, 48 of them the same, {ANSWERS} answers each")
    stale = moved = 0
    before = None
    with hf_paged.ContinuousBatcher(model, cache_config={"block_size": 8}) as batcher:
        for number in range(ROUNDS):
            for _ in range(STEPS):
                model.eval()
                texts = model.generate(prompts, attention_mask=mask, **sampled, **paged)
                model.train()
                reward = train(model, optimizer, texts, length)
            model.eval()
            # The proof: the trained weights, asked where older ones have left their blocks, in `generate` and in a
            # batcher of one's own that stays as well; and once more, now from blocks of these weights.
            right = copy.deepcopy(model).generate(prompts, attention_mask=mask, **greedy)
            found = []
            for _ in range(2):
                out = model.generate(prompts, attention_mask=mask, **greedy, **paged)
                outputs = batcher.generate(prompts.tolist(), greedy)
                stale += int((out != right).any(dim=1).sum())
                for row, output in zip(right[:, length:].tolist(), outputs, strict=True):
                    stale += row != list(output.output_token_ids)
                found.append([output.num_cached_tokens for output in outputs])
            moved += before is not None and not torch.equal(right, before)
            before = right
            print(f"   round {number}: mean reward {reward:.2f}; tokens found {found[0]}, asked again {found[1]}")
            # The first of the four computes what all begin with, whatever lies in the blocks.
            assert found == [[0, 48, 48, 48], [length - 1] * 4]
        hits = batcher.stats().prefix_hit_rate
    print(f"== {hits:.0%} of all tokens found within the rounds; rows that differ from plain generate: {stale}")
    assert moved, "training changed no text, so a stale prefix could not have shown"
    assert stale == 0
    hf_paged.release(model)


if __name__ == "__main__":
    main()
