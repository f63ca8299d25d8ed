"""Prompts that begin alike: their common beginning is computed once, and nothing changes but the work.

Runs offline on the demo model (converted once, about half a minute). Eight questions with one system prompt go through
a batcher that shares prefixes and through one that does not; the texts must be the same.
"""

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

SYSTEM = (
    "You are the assistant of a small library by the sea. Answer in one short sentence. The library opens at nine in "
    "the morning and closes at six in the evening, from Monday to Saturday. A reader may borrow five books for four "
    "weeks, and may keep each of them for four weeks more if nobody else waits for it. Maps and newspapers stay in the "
    "house. Children need the signature of a parent. A lost book costs what a new one costs."
)
QUESTIONS = [
    "When do you open?",
    "How many books may I borrow?",
    "May I take a map home?",
    "Are you open on Sunday?",
    "What does a lost book cost?",
    "For how long may I keep a book?",
    "May my daughter borrow a book?",
    "When do you close?",
]


def main() -> None:
    name = hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    greedy = {"max_new_tokens": 12, "do_sample": False}

    print(f"== {len(chats)} chats with one system prompt of {len(tokenizer(SYSTEM)['input_ids'])} tokens")
    texts = []
    for sharing in (False, True):
        config = {"enable_prefix_caching": sharing}
        with hf_paged.ContinuousBatcher(model, tokenizer=tokenizer, cache_config=config) as batcher:
            start = time.perf_counter()
            outputs = batcher.generate(chats, greedy)
            seconds = time.perf_counter() - start
            stats = batcher.stats()
            # A prompt's last token is always computed, since the first new one comes from it.
            computed = stats.prompt_tokens + len(chats)
            total = sum(len(output.prompt_token_ids) for output in outputs)
            print(
                f"   {'shared' if sharing else 'each for itself':>15}: {computed:5} of {total} prompt tokens computed, "
                f"{stats.prefix_hit_rate:.0%} found, {seconds:.1f} s"
            )
            texts.append([output.output_token_ids for output in outputs])
            if sharing:
                # The conversation goes on: the first turn and its answer are found as well.
                turn = [*chats[0], {"role": "assistant", "content": outputs[0].text}]
                turn.append({"role": "user", "content": "And when do you close?"})
                [second] = batcher.generate([turn], greedy)
                print(
                    f"== A second turn: {second.num_cached_tokens} of {len(second.prompt_token_ids)} tokens found, "
                    f"{second.text!r}"
                )
                # The system prompt changes: its blocks are found no more, whoever asks.
                gone = batcher.invalidate_prefix(chats[0])
                [again] = batcher.generate([chats[0]], greedy)
                print(
                    f"== Dropped: {sum(map(len, gone.block_ids))} blocks; the same chat then finds "
                    f"{again.num_cached_tokens} tokens, and its text is the same"
                )
                assert again.output_token_ids == outputs[0].output_token_ids and again.num_cached_tokens == 0
                # Two tenants never see each other's blocks.
                found = [batcher.generate([chats[0]], greedy, cache_salt=salt)[0].num_cached_tokens for salt in "aab"]
                print(f"== Tokens found by tenant a, tenant a again, tenant b: {found}")
                assert found[0] == found[2] == 0 < found[1]
    assert texts[0] == texts[1], "sharing changed a text"
    print("   The texts with and without sharing are the same.")


if __name__ == "__main__":
    main()
