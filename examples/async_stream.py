"""Many clients of one event loop, each reading its own stream while the others' requests run in the same batch.

Runs offline on the demo model (converted once, about half a minute).
"""

import asyncio
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

QUESTIONS = [
    "What is the largest planet?",
    "Name a fruit.",
    "What do bees make?",
    "Which ocean is the deepest?",
    "What is two plus two?",
    "Name a city in Italy.",
]


async def client(batcher, number: int, question: str) -> str:
    """Ask, and read the answer token by token."""
    await asyncio.sleep(0.3 * number)  # they come one after the other, and join the batch that runs
    started, first, text = time.perf_counter(), None, ""
    chat = [{"role": "user", "content": question}]
    async for output in batcher.astream([chat], {"max_new_tokens": 24, "do_sample": False}):
        first = first or time.perf_counter() - started
        text = output.text
    print(f"   client {number}: first token after {first:.2f} s, {question} {text!r}")
    return text


async def impatient(batcher) -> None:
    """A client that goes away: its request is aborted and its blocks come back."""
    async for output in batcher.astream(["Tell me a very long story."], {"max_new_tokens": 500}):
        if len(output.output_token_ids) == 3:
            break


async def main() -> None:
    name = hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with hf_paged.ContinuousBatcher(model, tokenizer=tokenizer, scheduler_config={"max_num_seqs": 8}) as batcher:
        print(f"== {len(QUESTIONS)} clients, and one that leaves early")
        clients = [client(batcher, number, question) for number, question in enumerate(QUESTIONS)]
        answers = (await asyncio.gather(impatient(batcher), *clients))[1:]
        stats = batcher.stats()
        tokens = f"{stats.new_tokens} tokens in {stats.steps} steps"
        print(f"== {tokens}, on average {stats.batch_occupancy * 8:.1f} requests at once")
        again = await batcher.agenerate(
            [[{"role": "user", "content": question}] for question in QUESTIONS],
            {"max_new_tokens": 24, "do_sample": False},
        )
        assert [output.text for output in again] == list(answers)
        print("   The same texts as all at once.")
        batcher.stop()
        batcher.check_integrity()
        assert batcher.stats().blocks_used == 0


if __name__ == "__main__":
    asyncio.run(main())
