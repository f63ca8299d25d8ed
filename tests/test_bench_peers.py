"""Engines of other environments: the process between, with stand-ins for the engines' packages.

The stand-ins have the interface of vllm and openvino_genai that the scripts use, note what they were given, and make
tokens from the prompt, so that what comes back can be checked. Whether the real ones are fast is for the full run.
"""

import json
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from hf_paged.cli import app
from hf_paged_eval.bench.peers.process import Peer, environment, parse_peers
from hf_paged_eval.bench.workloads import Prompt

VLLM = """
    import json, os, sys
    __version__ = "9.9"
    def note(**what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what) + "\\n")
    class SamplingParams:
        def __init__(self, **settings):
            self.settings = settings
    class Output:
        def __init__(self, tokens):
            self.token_ids = tokens
            self.outputs = [self]
    class LLM:
        def __init__(self, **settings):
            print("chatter that is no answer")
            note(llm=settings, kv=os.environ["VLLM_CPU_KVCACHE_SPACE"], bind=os.environ["VLLM_CPU_OMP_THREADS_BIND"],
                 omp=os.environ.get("OMP_NUM_THREADS"))
            if settings["model"] == "broken":
                sys.exit("cannot load it")
        def reset_prefix_cache(self):
            note(reset=True)
        def generate(self, prompts, params, use_tqdm):
            settings = [one.settings for one in params]
            assert not use_tqdm and all(one["ignore_eos"] and one["temperature"] == 0 for one in settings)
            if prompts[0]["prompt_token_ids"] == [13]:
                raise OSError("out of luck")
            return [Output([prompt["prompt_token_ids"][-1] + at for at in range(one.settings["max_tokens"])])
                    for prompt, one in zip(prompts, params)]
"""
GENAI = """
    import json, os
    __version__ = "8.8"
    class GenerationConfig: pass
    class SchedulerConfig: pass
    class Result:
        def __init__(self, tokens):
            self.m_generation_ids = [tokens]
    class ContinuousBatchingPipeline:
        def __init__(self, model, scheduler, device, properties):
            with open(os.environ["NOTES"], "a") as file:
                file.write(json.dumps(dict(model=model, device=device, **vars(scheduler), **properties)) + "\\n")
        def generate(self, prompts, configs):
            assert all(config.ignore_eos and not config.do_sample for config in configs)
            return [Result([int(prompt.data[0, -1]) + at for at in range(config.max_new_tokens)])
                    for prompt, config in zip(prompts, configs)]
"""
OPENVINO = """
    __version__ = "7.7"
    class Tensor:
        def __init__(self, data):
            self.data = data
"""

PROMPTS = [Prompt([3, 4, 5], 4), Prompt([9], 2)]
TOKENS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Put the stand-ins where a peer's interpreter finds them; what they noted."""
    for name, text in (("vllm", VLLM), ("openvino_genai", GENAI), ("openvino", OPENVINO)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return lambda: [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]


def test_vllm_gets_its_best_settings_and_gives_tokens(notes):
    peer = Peer("vllm", sys.executable, "folder", "bfloat16", threads=2)
    try:
        peer.prepare(PROMPTS)
        assert peer.generate(PROMPTS) == TOKENS and peer.generate(PROMPTS[:1]) == TOKENS[:1]
        assert 0 < peer.seconds < 5 and peer.pid > 0
        assert peer.settings["version"] == "vllm 9.9" and peer.settings["enable_prefix_caching"]
        with pytest.raises(RuntimeError, match="vllm: OSError: out of luck"):
            peer.generate([Prompt([13], 1)])
    finally:
        process = peer._process
        peer.close()
    assert process.returncode is not None and peer.pid is None
    made, *resets = notes()
    assert made["llm"]["model"] == "folder" and made["llm"]["dtype"] == "bfloat16"
    assert (made["kv"], made["bind"], made["omp"]) == ("2", "0-1", None)
    assert resets == [{"reset": True}] * 3


def test_openvino_is_made_anew_for_each_run(notes):
    peer = Peer("openvino", sys.executable, "exported", "float32", threads=3)
    try:
        peer.prepare(PROMPTS)
        assert peer.generate(PROMPTS) == TOKENS and peer.generate(PROMPTS) == TOKENS
        assert peer.settings["version"] == "openvino-genai 8.8 openvino 7.7"
    finally:
        peer.close()
    one, two = notes()
    assert one == two and one["model"] == "exported" and one["device"] == "CPU"
    assert one["INFERENCE_NUM_THREADS"] == 3 and one["KV_CACHE_PRECISION"] == one["INFERENCE_PRECISION_HINT"] == "f32"
    assert one["enable_prefix_caching"] and one["dynamic_split_fuse"]


def test_a_peer_that_dies_says_why(notes):
    peer = Peer("vllm", sys.executable, "broken", "float32", threads=1)
    try:
        with pytest.raises(RuntimeError, match=r"(?s)vllm ended \(exit status 1\) and said:.*cannot load it"):
            peer.prepare(PROMPTS)
    finally:
        peer.close()


def test_options_of_peers_are_checked(monkeypatch, tmp_path):
    assert parse_peers([f"vllm={sys.executable}"]) == {"vllm": sys.executable}
    for wrong in ("vllm", "llama=x", "vllm="):
        with pytest.raises(ValueError, match="expected NAME=INTERPRETER with NAME of vllm, openvino"):
            parse_peers([wrong])
    with pytest.raises(ValueError, match="there is no interpreter"):
        parse_peers([f"vllm={tmp_path / 'nothing'}"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    made = environment(str(tmp_path / "bin" / "python"))
    assert "OMP_WAIT_POLICY" not in made and made["LD_PRELOAD"].endswith(str(tmp_path / "lib" / "libiomp5.so"))


@pytest.mark.demo_model
def test_a_peer_takes_part_in_the_bench(notes, tmp_path):
    file = tmp_path / "out.json"
    command = ["bench", "throughput", "--quick", "--model", "tiny", "--workload", "decode", "--rounds", "2"]
    command += ["--engine", "vllm", "--peer-python", f"vllm={sys.executable}", "--json", str(file)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    (work,) = json.loads(file.read_text())["results"]["workloads"]
    assert list(work["engines"]) == ["hf_paged", "vllm"] and work["reference"] == "hf_paged"
    row = work["engines"]["vllm"]
    assert len(row["seconds"]) == 2 and row["peak_mib"] > 1 and row["settings"]["version"] == "vllm 9.9"
    assert row["ours_times"] < 1 and row["agreement"]["same_requests"] == 0 and len(row["agreement"]["gaps"]) == 4
    assert sum("reset" in note for note in notes()) == 3  # a warm-up and two rounds


def test_openvino_needs_its_own_form_of_the_model(notes):
    command = ["bench", "throughput", "--quick", "--model", "tiny", "--peer-python", f"openvino={sys.executable}"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 1 and "openvino needs --openvino-model" in ran.output
