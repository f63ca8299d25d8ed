"""An engine in a process of another Python environment, as a bench sees it.

Contract: the process is started once, at the first use, and keeps its engine; the seconds that count are those that it
measures around its own generation. What it prints goes to a log that an error quotes. `close` ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..engines import KV_GIB, Engine
from ..machine import tree
from ..workloads import Prompt, Workload
from .loop import MARK

PEERS = {"vllm": "vllm_peer.py", "openvino": "openvino_peer.py"}


def parse_peers(given: Sequence[str]) -> dict[str, str]:
    """`--peer-python NAME=INTERPRETER` options by name.

    Raises:
        ValueError: the name of an engine that there is no script for, or a file that is not there.
    """
    found = {}
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS or not python:
            raise ValueError(f"--peer-python: expected NAME=INTERPRETER with NAME of {', '.join(PEERS)}, got {text!r}")
        if not Path(python).is_file():
            raise ValueError(f"--peer-python {name}: there is no interpreter {python!r}")
        found[name] = python
    return found


class Peer(Engine):
    """One engine of PEERS.

    Args:
        name: of the engine.
        python: the interpreter of its environment.
        model: folder of the model in the form that the engine reads.
        dtype: "float32", "bfloat16" or "float16", for weights and KV.
        threads: that it may use.
        device: "cpu" or "cuda".
        max_model_len: positions that a request may have.
    """

    def __init__(
        self, name: str, python: str, model: str, dtype: str, threads: int, device: str = "cpu", max_model_len=8192
    ) -> None:
        self.name, self._python = name, python
        self._options = {
            "model": model,
            "dtype": dtype,
            "threads": threads,
            "device": device,
            "kv_gib": int(KV_GIB),
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "max_model_len": max_model_len,
        }
        self._process: subprocess.Popen | None = None
        self.seconds = 0.0

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        if self._process is None:
            self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hf-paged-peer-")
        self._log = open(Path(self._folder.name) / "log", "w+", encoding="utf-8")  # noqa: SIM115
        script = Path(__file__).with_name(PEERS[self.name])
        self._process = subprocess.Popen(
            [self._python, str(script), json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(self._python),
            start_new_session=True,
        )
        self.pid = self._process.pid
        ready = self._answer()
        self.settings = {**ready["settings"], "version": ready["version"]}

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        folder = Path(self._folder.name)
        requests, tokens = folder / "requests.jsonl", folder / "tokens.json"
        requests.write_text(Workload("", tuple(prompts)).json_lines(), encoding="utf-8")
        print(json.dumps({"requests": str(requests), "tokens": str(tokens)}), file=self._process.stdin, flush=True)
        self.seconds = self._answer()["seconds"]
        return json.loads(tokens.read_text(encoding="utf-8"))

    def _answer(self) -> dict:
        printed: list[str] = []
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}")
                return answer
            printed = [*printed[-20:], line]
        self._log.seek(0)
        said = "".join([*printed, *self._log.readlines()[-20:]])
        raise RuntimeError(f"{self.name} ended (exit status {self._process.wait()}) and said:\n{said}")

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process, self.pid = self._process, None, None
        family = tree(process.pid)
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        time.sleep(0.1)
        for one in family:  # workers that outlived it
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()
        process.stdout.close()
        self._log.close()
        self._folder.cleanup()


def environment(python: str) -> dict[str, str]:
    """The environment of a peer: without our settings of OpenMP, with the libraries that it advises to preload.

    vLLM's documentation advises tcmalloc and Intel's OpenMP for a CPU; whichever of them is installed is taken.
    """
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    places = [Path(root) / "lib" for root in ("/usr", "/usr/local")]
    wanted = [next(iter(sorted(place.glob("**/libtcmalloc_minimal.so.4"))), None) for place in places if place.is_dir()]
    wanted.append(Path(python).parent.parent / "lib" / "libiomp5.so")
    found = [str(file) for file in wanted if file is not None and file.is_file()]
    return {**kept, "LD_PRELOAD": ":".join(found)} if found else kept
