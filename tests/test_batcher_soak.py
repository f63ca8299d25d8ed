"""2,000 requests through one batcher: nothing is lost, nothing is given twice, memory stays where it is."""

import collections
import gc
import random
import threading

import psutil
import pytest
import torch
from batcher_helpers import batcher, check_idle, greedy, in_threads, plain
from tiny_models import build

NUM_REQUESTS, CALLERS = 2000, 4


def prompt_of(number: int) -> list[int]:
    """Every request has another prompt, whose first tokens are its number."""
    rng = random.Random(number)
    return [3 + number // 190, 3 + number % 190, *(rng.randrange(3, 199) for _ in range(rng.choice((0, 3, 10, 30))))]


def new_of(number: int) -> int:
    return 1 + number * 7 % 12


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_two_thousand_requests(background):
    model = build("llama_gqa", num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    process, memory, lock = psutil.Process(), [], threading.Lock()
    ended, aborted = collections.Counter(), set()
    with batcher(model, cache_config={"num_blocks": 60}, max_num_seqs=24, max_num_batched_tokens=64) as one:
        if background:
            one.start()

        def note(number, output):
            assert list(output.prompt_token_ids) == prompt_of(number)
            if number not in aborted:
                assert output.finish_reason == "length" and len(output.output_token_ids) == new_of(number), output
            with lock:
                ended[number] += 1
                if len(ended) % 250 == 0:
                    gc.collect()
                    memory.append(process.memory_info().rss)

        def caller(which):
            numbers = list(range(which, NUM_REQUESTS, CALLERS))
            rng = random.Random(which)
            while numbers:
                count = rng.randint(1, 20)
                some, numbers = numbers[:count], numbers[count:]
                rows, configs = [prompt_of(n) for n in some], [greedy(new_of(n)) for n in some]
                way = rng.choice(("generate", "stream", "add", "abort"))
                if way == "generate":
                    for number, output in zip(some, one.generate(rows, configs), strict=True):
                        note(number, output)
                elif way == "stream":
                    by_prompt = {tuple(row): number for row, number in zip(rows, some, strict=True)}
                    for output in one.stream(rows, configs):
                        if output.finished:
                            note(by_prompt[output.prompt_token_ids], output)
                else:
                    ids = [one.add_request(row, generation_config=c) for row, c in zip(rows, configs, strict=True)]
                    if way == "abort":
                        aborted.add(some[0])
                        one.abort(ids[0])
                    for number, request_id in reversed(list(zip(some, ids, strict=True))):
                        note(number, one.result(request_id))

        results = in_threads(*(lambda which=which: caller(which) for which in range(CALLERS)), timeout=280)
        assert results == [None] * CALLERS
        check_idle(one)
        assert one.stats().preemptions and len(ended) == NUM_REQUESTS and set(ended.values()) == {1}
        for number in range(0, NUM_REQUESTS, 97):
            if number not in aborted:
                [output] = one.generate([prompt_of(number)], greedy(new_of(number)))
                want = plain(model, prompt_of(number), **greedy(new_of(number)))
                with torch.no_grad():
                    assert list(output.output_token_ids) == want
    grown = memory[-1] - memory[len(memory) // 2 - 1]
    assert grown < 8 * 2**20, [round(value / 2**20, 1) for value in memory]
