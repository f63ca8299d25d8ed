"""Four faults put into the cache, each found by the gate command itself; and the same run without them passes.

Contract: faults are put in here, around the operators that the package calls, and only for caches of 8 bits, so that
the baseline of the same run stays right. Model, text and limits are real: the demo model, and its own.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import hf_paged_kernels as kernels
from hf_paged.cli import app
from hf_paged_eval.corpus import embedded_texts

pytestmark = pytest.mark.demo_model

LAYER = 0  # whose scales are read wrong
LIMITS = "built-in gates.toml [models.smollm2-135m.fp8_e4m3]"
EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Eight documents, a few hundred tokens each."""
    folder = tmp_path_factory.mktemp("gate")
    texts = [text[:800] for text in embedded_texts()[1:] if len(text) > 900]
    (folder / "text.json").write_text(json.dumps(texts[:: len(texts) // 8][:8]))
    return folder


def gate(inputs, tmp_path, tokens=520, model="demo"):
    """Exit status and record of `hf-paged eval gate`, on little more text than decides anything."""
    command = ["eval", "gate", "--model", str(model), "--path", str(inputs / "text.json"), "--quiet"]
    command += ["--report", str(tmp_path / "report"), "--max-tokens", str(tokens)]
    ran = CliRunner().invoke(app, command)
    assert (tmp_path / "report" / "report.json").exists(), ran.output
    return ran.exit_code, json.loads((tmp_path / "report" / "report.json").read_text())


def around_attention(monkeypatch, change):
    """Have `change(key_cache, tables, options)` give other tables and options to attention over 8-bit caches."""
    for name in ("paged_prefill", "paged_decode"):
        right = getattr(kernels, name)

        def wrong(query, key_cache, value_cache, tables, *rest, right=right, **options):
            if key_cache.dtype in EIGHT_BITS:
                tables, options = change(key_cache, tables, options)
            return right(query, key_cache, value_cache, tables, *rest, **options)

        monkeypatch.setattr(kernels, name, wrong)


def around_writing(monkeypatch, change):
    """Have `change(key, value, options)` give other keys, values and options to what writes 8-bit caches."""
    right = kernels.reshape_and_cache

    def wrong(key, value, key_cache, value_cache, slot_mapping, **options):
        if key_cache.dtype in EIGHT_BITS:
            key, value, options = change(key, value, options)
        return right(key, value, key_cache, value_cache, slot_mapping, **options)

    monkeypatch.setattr(kernels, "reshape_and_cache", wrong)


def assert_regression(status, record):
    assert record["limits"]["source"] == LIMITS
    assert status == record["exit_code"] == 1 and record["outcome"] == "fail"
    overall = record["summary"]["overall"]
    assert overall["kl_mean"] - 2 * overall["kl_se"] > 0.02
    # The baseline beside it is right: the fault is the candidate's alone.
    assert 5 < overall["reference_perplexity"] < 40


def test_without_a_fault_it_passes(inputs, tmp_path):
    status, record = gate(inputs, tmp_path, tokens=1500)
    assert status == 0 and record["outcome"] in ("pass", "warn")
    overall = record["summary"]["overall"]
    assert record["num_tokens"] == 1500 and overall["kl_mean"] + 2 * overall["kl_se"] < 0.02


def test_scales_read_at_twice_what_was_written_in_one_layer(inputs, tmp_path, monkeypatch):
    layers = []

    def change(key_cache, tables, options):
        if key_cache.data_ptr() not in layers:
            layers.append(key_cache.data_ptr())
        if key_cache.data_ptr() == layers[LAYER]:
            options = {**options, "k_scale": 2 * options["k_scale"], "v_scale": 2 * options["v_scale"]}
        return tables, options

    around_attention(monkeypatch, change)
    assert_regression(*gate(inputs, tmp_path))


def test_keys_and_values_swapped(inputs, tmp_path, monkeypatch):
    around_writing(monkeypatch, lambda key, value, options: (value, key, options))
    assert_regression(*gate(inputs, tmp_path))


def test_one_wrong_entry_in_the_block_table_of_each_document(inputs, tmp_path, monkeypatch):
    def change(key_cache, tables, options):
        tables = tables.clone()
        if tables.shape[1] > 1:
            tables[:, 1] = tables[:, 0]  # written whenever the second one is read
        return tables, options

    around_attention(monkeypatch, change)
    assert_regression(*gate(inputs, tmp_path))


def test_scale_one_on_a_model_whose_values_were_rescaled(inputs, tmp_path, monkeypatch, demo_model):
    """The rescaled model computes the same text; only the range of its values is another."""
    model, tokenizer = copy.deepcopy(demo_model[0]), demo_model[1]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 2.0**-12
            layer.self_attn.o_proj.weight *= 2.0**12
    folder = tmp_path / "SmolLM2-135M-Instruct-rescaled"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    status, record = gate(inputs, tmp_path, model=folder)
    overall = record["summary"]["overall"]  # with scales of its own it is as good as before
    assert status != 1 and record["limits"]["source"] == LIMITS and overall["kl_mean"] + 2 * overall["kl_se"] < 0.02

    scales = {}

    def write(key, value, options):
        scales["v"] = torch.ones(value.shape[1])
        return key, value, {**options, "v_scale": scales["v"]}

    def read(key_cache, tables, options):
        return tables, {**options, "v_scale": scales["v"]}

    around_writing(monkeypatch, write)
    around_attention(monkeypatch, read)
    assert_regression(*gate(inputs, tmp_path, model=folder))
