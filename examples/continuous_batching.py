"""Continuous batching: requests of unequal length, each with its own settings, through one running batch.

Runs offline on the demo model (converted once, about half a minute). Every greedy text is compared with plain
`generate` of its prompt alone.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import hf_paged


class NoDigits(LogitsProcessor):
    """A processor of one's own; it sees the whole history of its own request."""

    def __init__(self, tokenizer) -> None:
        self.digits = [token for text, token in tokenizer.get_vocab().items() if any(c.isdigit() for c in text)]

    def __call__(self, input_ids, scores):
        scores[:, self.digits] = float("-inf")
        return scores


def main() -> None:
    name = hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    greedy = {"max_new_tokens": 24, "do_sample": False}

    with hf_paged.ContinuousBatcher(model, tokenizer=tokenizer) as batcher:
        print("== A list of prompts, results in their order")
        prompts = ["The capital of France is", "Water boils at", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"]
        for prompt, output in zip(prompts, batcher.generate(prompts, greedy), strict=True):
            print(f"   {prompt!r} -> {output.text!r} ({output.finish_reason})")
            ids = torch.tensor([output.prompt_token_ids])
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, ids.shape[1] :]
            assert list(output.output_token_ids) == plain.tolist()
        print("   Each equals plain generate of its prompt alone.")

        print("== Requests with settings of their own, step by step")
        ids = {
            "a chat": batcher.add_request(
                [{"role": "user", "content": "Name one colour."}], generation_config={**greedy, "max_new_tokens": 12}
            ),
            "a stop string": batcher.add_request(
                "Monday, Tuesday,", generation_config={**greedy, "stop_strings": ["Friday", "weekend"]}
            ),
            "a penalty and a processor": batcher.add_request(
                "1, 2, 3, 4,",
                generation_config={**greedy, "repetition_penalty": 1.3},
                logits_processor=[NoDigits(tokenizer)],
            ),
            "a seeded sample": batcher.add_request(
                "Once upon a time", generation_config={"max_new_tokens": 16, "do_sample": True, "top_p": 0.9}, seed=7
            ),
        }
        steps = 0
        while batcher.step():
            steps += 1
        for what, request_id in ids.items():
            output = batcher.result(request_id)
            print(f"   {what}: {output.text!r} ({output.finish_reason})")
        print(f"   {len(ids)} requests in {steps} steps")

        print("== Three samples of one prompt; its blocks are stored once")
        settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "num_return_sequences": 3}
        for output in batcher.generate(["My favourite animal is"], settings, seed=1, logprobs=0):
            mean = sum(token.logprob for token in output.logprobs) / len(output.logprobs)
            print(f"   {output.index}: {output.text!r}, mean log-probability {mean:.2f}")

        print("== Tokens as they arrive, from two prompts at once")
        for output in batcher.stream(["The sun is", "The moon is"], {**greedy, "max_new_tokens": 6}):
            new = tokenizer.decode(output.new_token_ids)
            print(f"   {output.request_id}: {new!r}" + (f" ({output.finish_reason})" if output.finished else ""))

        stats = batcher.stats()
        print(
            f"== {stats.steps} steps, {stats.new_tokens} tokens, {stats.tokens_per_second:.0f} tokens a second, "
            f"bookkeeping {stats.bookkeeping_us:.0f} us a step, {stats.blocks_used} of {stats.blocks_total} blocks held"
        )


if __name__ == "__main__":
    main()
