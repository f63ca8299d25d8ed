"""Stored baselines: what belongs to a key, what is refused; model identity."""

import dataclasses
import json
import math

import pytest
import torch
from tiny_models import build

from hf_paged_eval import baselines
from hf_paged_eval.baselines import Baseline, BaselineKey
from hf_paged_eval.identity import display_name, model_identity

KEY = BaselineKey("org/model", "sha256:aa", "corpus", "sha256:bb", {"max_length": 512, "stride": None})


def baseline(key=KEY, nll=2000.0, count=800):
    return Baseline(key, math.exp(nll / count), nll, count, {"torch": "1"}, "2026-01-01T00:00:00+00:00")


def test_what_was_stored_is_found(tmp_path):
    file = baselines.store(tmp_path, baseline())
    assert file.parent == tmp_path and [one.name for one in tmp_path.iterdir()] == [file.name]
    assert baselines.find(tmp_path, KEY) == (baseline(), [])
    assert baselines.load(file) == baseline() == baselines.refuse_unless_fitting(file, KEY)
    newer = baseline(nll=2001.0)
    assert baselines.store(tmp_path, newer) == file and baselines.find(tmp_path, KEY)[0] == newer
    # Names are for people: the same content under another name is the same.
    assert baselines.find(tmp_path, dataclasses.replace(KEY, model="elsewhere", corpus="also"))[0] == newer


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weights": "sha256:ab"}, "foreign: of other weights"),
        ({"corpus_hash": "sha256:bc"}, "stale: of another text"),
        ({"corpus": "else", "corpus_hash": "sha256:bc"}, "foreign: of another text"),
        ({"settings": {"max_length": 256, "stride": None}}, "max_length 512, not 256"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, word):
    file = baselines.store(tmp_path, baseline())
    asked = dataclasses.replace(KEY, **change)
    found, refused = baselines.find(tmp_path, asked)
    assert found is None
    # In a folder only what goes by the same names and settings was meant for this run.
    assert bool(refused) == (set(change) in ({"weights"}, {"corpus_hash"}))
    assert all(word in one and file.name in one for one in refused)
    with pytest.raises(ValueError, match=word):
        baselines.refuse_unless_fitting(file, asked)


def test_another_format_is_stale(tmp_path):
    file = baselines.store(tmp_path, baseline())
    file.write_text(file.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(ValueError, match="stale: not of format"):
        baselines.refuse_unless_fitting(file, KEY)
    found, refused = baselines.find(tmp_path, KEY)
    assert found is None and "stale" in refused[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.pop("perplexity"),
        lambda raw: raw.update(perplexity=raw["perplexity"] * 1.01),
        lambda raw: raw.update(perplexity=float("nan")),
        lambda raw: raw.update(num_tokens=0),
        lambda raw: raw["key"].pop("weights"),
        lambda raw: raw["key"].update(more=1),
    ],
)
def test_edited_records_are_refused(tmp_path, edit):
    file = baselines.store(tmp_path, baseline())
    raw = json.loads(file.read_text())
    edit(raw)
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=file.name.replace(".", r"\.")):
        baselines.load(file)
    with pytest.raises(ValueError, match="baseline|contradicts"):
        baselines.find(tmp_path, KEY)


def test_no_number_is_no_baseline(tmp_path):
    with pytest.raises(ValueError, match="no baseline"):
        baselines.store(tmp_path, dataclasses.replace(baseline(), perplexity=math.nan))
    assert not list(tmp_path.iterdir())


def test_those_of_the_package_are_whole():
    files = sorted(baselines.BUILT_IN.glob("*.json"))
    assert files
    for file in files:
        record = baselines.load(file)
        assert file.name == record.key.file_name() and not baselines.differences(record, record.key)


def test_identity_is_that_of_the_weights(tmp_path):
    model = build("llama_gqa")
    identity = model_identity(model, "org/name")
    assert identity == model_identity(model, "org/name") and identity.name == "org/name"
    assert identity.num_parameters == sum(weight.numel() for weight in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert model_identity(again, tmp_path / "saved").weights == identity.weights
    assert model_identity(again, tmp_path / "saved").name == "saved"
    with torch.no_grad():
        again.model.layers[1].self_attn.v_proj.weight[3, 4] += 1e-3
    changed = model_identity(again).weights
    assert changed != identity.weights
    assert model_identity(again.to(torch.bfloat16)).weights not in (changed, identity.weights)


def test_names_hold_no_path(tmp_path):
    assert display_name(tmp_path / "gone") == "gone" and display_name("org/name") == "org/name"
    (tmp_path / "here").mkdir()
    assert display_name(tmp_path / "here") == "here"
