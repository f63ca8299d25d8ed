"""The other side of a peer process: commands on stdin, answers on stdout. Standard library only.

Contract: `serve(engine, version, settings)` says `ready`, then answers each line of JSON. A command names a file of
requests (a JSON object with `prompt_token_ids` and `max_new_tokens` a line) and where to write their new tokens; the
answer holds the wall seconds of the generation alone. Answers begin with MARK, since engines print as they like.
An empty line or the end of stdin ends the process.
"""

import json
import sys
import time

MARK = "hf-paged-peer "


def answer(**fields):
    print(MARK + json.dumps(fields), flush=True)


def read_requests(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    return [(line["prompt_token_ids"], line["max_new_tokens"]) for line in lines]


def serve(engine, version, settings):
    """Run an engine with `generate(requests) -> tokens of each` and `reset()` for whoever writes to stdin."""
    answer(ready=True, version=version, settings=settings)
    for line in sys.stdin:
        if not line.strip():
            break
        command = json.loads(line)
        try:
            requests = read_requests(command["requests"])
            engine.reset()
            start = time.perf_counter()
            tokens = engine.generate(requests)
            seconds = time.perf_counter() - start
            with open(command["tokens"], "w", encoding="utf-8") as file:
                json.dump([[int(token) for token in row] for row in tokens], file)
            answer(seconds=seconds)
        except Exception as error:  # told to the bench, which ends the process
            answer(error=f"{type(error).__name__}: {error}")
