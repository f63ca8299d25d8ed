"""The quality gate from Python: is an 8-bit KV cache good enough for this model, and how sure is the answer?

Runs offline on the demo model (converted once, about half a minute) and on text that Python brings along.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged_eval.gate_cli import show
from hf_paged_eval.gate_run import run_gate
from hf_paged_eval.gate_text import text_of
from hf_paged_eval.report import write_reports

TOKENS = 2000


def main() -> None:
    name = hf_paged.demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    text = text_of(tokenizer, max_tokens=TOKENS)
    outcomes = {}
    for dtype in ("int8", "fp8_e4m3"):
        print(f"== {dtype}: {TOKENS} tokens through its pages, and through pages of float32 beside them", flush=True)
        result = run_gate(model, text, {"kv_cache_dtype": dtype}, name="demo", progress_bar=sys.stderr.isatty())
        show(result.record)
        with tempfile.TemporaryDirectory() as folder:
            written = write_reports(result.record, folder)
            sizes = ", ".join(f"{Path(file).name} {file.stat().st_size / 1024:.0f} KiB" for file in written.values())
        print(f"   reports: {sizes}")
        outcomes[dtype] = result.verdict
    # "inconclusive" is an answer, too: more tokens would tell. A regression is what must stop a release.
    assert all(verdict.exit_code != 1 for verdict in outcomes.values()), outcomes


if __name__ == "__main__":
    main()
