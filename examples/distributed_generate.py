"""A file of prompts, split over processes: each has the whole model and a batcher of its own.

    torchrun --nproc_per_node 2 examples/distributed_generate.py --prompts prompts.txt
    accelerate launch --multi_gpu --num_processes 2 examples/distributed_generate.py
    python examples/distributed_generate.py

The first two start processes on CPUs as well as on GPUs (`accelerate launch --cpu` starts only one on a machine,
whatever --num_processes says). ACCELERATE_USE_CPU=1 keeps them on the CPU where there is a GPU.

Results come back in the order of the prompts, whichever process computed them. Runs offline on the demo model
(converted once, about half a minute) and prompts of its own, unless told otherwise.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Monday, Tuesday,",
    "Once upon a time there was a small harbour where every boat had a name, and the oldest of them",
]


def read_prompts(file: Path | None) -> list[str]:
    """The lines of a file that are not blank; the built-in prompts without one."""
    if file is None:
        return PROMPTS
    prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise typer.BadParameter(f"{file} holds no prompt", param_hint="--prompts")
    return prompts


def generate(state: PartialState, name: str, prompts: list[str], max_new_tokens: int) -> list[dict]:
    """What this process makes of its share of the prompts."""
    if not prompts:
        return []  # more processes than prompts
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(state.device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with hf_paged.ContinuousBatcher(model, tokenizer=tokenizer) as batcher:
        # One progress bar is enough: the shares are of equal size.
        show = state.is_main_process and sys.stderr.isatty()
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
        outputs = batcher.generate(prompts, settings, progress_bar=show)
    return [
        {
            "prompt": prompt,
            "text": output.text,
            "output_token_ids": list(output.output_token_ids),
            "finish_reason": output.finish_reason,
            "process": state.process_index,
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def main(
    model: Annotated[str | None, typer.Option(help="Folder or Hub name of a model; default: the demo model.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt a line; blank lines do not count.", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results here, as JSON lines.", dir_okay=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, at most.")] = 24,
) -> None:
    """Generate for a file of prompts, over as many processes as accelerate or torchrun starts."""
    everything = read_prompts(prompts)  # in every process, so that all of them stop at a file that is wrong
    # Only where it is told so does it join several processes on CPUs.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    with state.main_process_first():  # only one converts the demo model
        name = model or str(hf_paged.demo_model_path())
    # Shares follow one another in the order of the processes; gathered lists are joined in that order again.
    with state.split_between_processes(everything) as share:
        results = gather_object(generate(state, name, share, max_new_tokens))
    if state.is_main_process:
        if output is not None:
            lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in results]
            output.write_text("".join(lines), encoding="utf-8")
        for result in results:
            print(f"{result['prompt']!r} -> {result['text']!r} (process {result['process']})")
        print(f"== {len(results)} prompts over {state.num_processes} process(es)")
    state.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
