"""examples/distributed_generate.py over two processes: the results of one, in the order of the prompts.

Contract: the processes run on CPUs and talk over the loopback device only (gloo); the model is a tiny one in a folder
of the test. The one process is that of the tests, as starting another takes seconds; `make examples` starts it alone.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import typer
from accelerate import PartialState
from tiny_models import VOCAB, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "distributed_generate.py"
PROMPTS = ["w5 w6 w7", "w30 w31 w32 w33 w34 w35 w36 w37 w38", "w90"]
NEW = 6
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
    ],
}


def example():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("distributed_generate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny llama with a tokenizer whose words are "w0", "w1" and so on."""
    folder = tmp_path_factory.mktemp("model")
    build("llama_gqa").save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0").save_pretrained(folder)
    return folder


def run(launcher: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    loopback = next((name for name in ("lo", "lo0") if name in psutil.net_if_addrs()), None)
    rooms = os.pathsep.join(str(SCRIPT.parent.parent / room) for room in ("", "kernels", "eval"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (rooms, os.environ.get("PYTHONPATH")))),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "nothing_of_the_user"),  # where accelerate would look for settings of its own
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), "--model", str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def run_here(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    app = typer.Typer()
    app.command()(example().main)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", "true")
            ran = CliRunner().invoke(app, ["--model", str(folder), *arguments])
    finally:
        PartialState._reset_state()  # what accelerate knows of the processes stays for the whole of this one otherwise
    return subprocess.CompletedProcess(arguments, ran.exit_code, ran.stdout, ran.stderr + repr(ran.exception))


def results(launcher: str | None, folder: Path, tmp_path: Path, prompts: list[str]) -> list[dict]:
    file, output = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    file.write_text("\n".join([prompts[0], "", *prompts[1:], ""]), encoding="utf-8")
    options = ["--prompts", str(file), "--output", str(output), "--max-new-tokens", str(NEW)]
    ran = run(launcher, folder, *options) if launcher else run_here(folder, *options)
    assert ran.returncode == 0, ran.stderr
    # Each result is printed once, whatever number of processes there are.
    assert [line.split(" -> ")[0] for line in ran.stdout.splitlines() if " -> " in line] == list(map(repr, prompts))
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    return results(None, folder, tmp_path_factory.mktemp("alone"), PROMPTS)


def without_process(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "process"}


def test_one_process_gives_plain_generate(folder, alone):
    model = build("llama_gqa")
    assert [result["process"] for result in alone] == [0] * len(PROMPTS)
    for prompt, result in zip(PROMPTS, alone, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert result["output_token_ids"] == plain[0, ids.shape[1] :].tolist()
        assert result["text"].split() == [f"w{token}" for token in result["output_token_ids"]]
        assert (result["prompt"], result["finish_reason"]) == (prompt, "length")


@pytest.mark.parametrize(
    "launcher, count, processes", [("torchrun", 3, [0, 0, 1]), ("accelerate", 1, [0])], ids=["uneven", "fewer"]
)
def test_two_processes_give_the_results_of_one(folder, alone, tmp_path, launcher, count, processes):
    split = results(launcher, folder, tmp_path, PROMPTS[:count])
    assert [result["process"] for result in split] == processes
    assert list(map(without_process, split)) == list(map(without_process, alone[:count]))


def test_a_file_without_a_prompt_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(typer.BadParameter, match="holds no prompt"):
        example().read_prompts(file)
