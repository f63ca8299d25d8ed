"""gates.toml: which limits a model gets, and what is refused."""

import pytest

from hf_paged_eval.gate_limits import BUILT_IN, Limit, canonical_dtype, limits_for

OWN = """
[default]
mean_kld = { fail = 0.5 }

[models.mine]
names = ["team/mine-*", "sha256:abc*"]
min_tokens = 7
top1 = { warn = 0.9, fail = 0.8 }

[models.mine.fp8_e4m3]
ratio = { warn = 1.1, fail = 1.2 }
[models.mine.fp8_e4m3.buckets.4k-8k]
mean_kld = { fail = 0.3 }

[models.mine."k:int8,v:fp8_e5m2"]
ratio = { fail = 1.5 }
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return file


def test_unknown_models_get_the_default_profile():
    limits = limits_for(["nobody/knows"], "fp8_e5m2")
    assert limits.overall == {"ratio": Limit(1.005, 1.01), "mean_kld": Limit(0.01, 0.02), "top1": Limit(0.94, 0.92)}
    assert limits.buckets == {} and limits.source == "built-in gates.toml [default]"


def test_a_model_and_dtype_of_the_users_file(own):
    limits = limits_for(["team/mine-7B"], "fp8_e4m3", own)
    assert limits.overall["ratio"] == Limit(1.1, 1.2)  # of the dtype
    assert limits.overall["top1"] == Limit(0.9, 0.8) and limits.min_tokens == 7  # of the model
    assert limits.overall["mean_kld"] == Limit(None, 0.5)  # of the file's default
    assert limits.buckets == {"4k-8k": {"mean_kld": Limit(None, 0.3)}}
    assert limits.drift == Limit(0.0002, 0.001)  # of the package's default
    assert limits.source == "own.toml [models.mine.fp8_e4m3]"


def test_other_dtypes_of_that_model(own):
    limits = limits_for(["sha256:abc123"], "int8", own)
    assert limits.overall["ratio"] == Limit(1.005, 1.01) and limits.buckets == {}
    assert limits.source == "own.toml [models.mine]"
    for spelled in ("k:int8,v:fp8_e5m2", {"k": "int8", "v": "fp8_e5m2"}, "v:fp8_e5m2, k:int8"):
        assert limits_for(["team/mine-7B"], spelled, own).overall["ratio"] == Limit(None, 1.5)


def test_the_users_default_comes_before_the_packages_models(own):
    limits = limits_for(["demo"], "fp8_e4m3", own)
    assert limits.source == "own.toml [default]" and limits.overall["mean_kld"] == Limit(None, 0.5)
    without = own.with_name("without.toml")
    without.write_text("[models.other]\nratio = { fail = 9 }\n")
    assert limits_for(["demo"], "fp8_e4m3", without) == limits_for(["demo"], "fp8_e4m3")


def test_a_full_name_comes_before_a_pattern(tmp_path):
    file = tmp_path / "gates.toml"
    file.write_text(
        '[models.a]\nnames = ["m*"]\nratio = {fail = 1.1}\n[models.b]\nnames = ["me"]\nratio = {fail = 1.2}\n'
    )
    assert limits_for(["me"], "int8", file).overall["ratio"].fail == 1.2
    assert limits_for(["mine"], "int8", file).overall["ratio"].fail == 1.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default\n", "not TOML"),
        ("[defaults]\n", "unknown defaults"),
        ("[default]\nperplexity = {fail = 1}\n", "unknown perplexity"),
        ("[default]\nratio = 1.01\n", "ratio must be a table"),
        ("[default]\nratio = {fails = 1.01}\n", "unknown fails"),
        ("[default]\nratio = {fail = 'much'}\n", "must be a number"),
        ("[default]\nratio = {fail = true}\n", "must be a number"),
        ("[default]\ntop1 = {fail = 92}\n", r"\[0.0, 1.0\], got 92"),
        ("[default]\nratio = {warn = 1.02, fail = 1.01}\n", "beyond fail"),
        ("[default]\ntop1 = {warn = 0.9, fail = 0.95}\n", "beyond fail"),
        ("[default]\nmin_tokens = 0\n", "min_tokens"),
        ("[models.a]\nnames = 'a'\n", "names must be a list"),
        ("[models.a.fp8]\nratio = {fail = 1.1}\n", "neither a limit nor a dtype"),
        ("[models.a.buckets.5k]\nratio = {fail = 1.1}\n", "no position bucket '5k'"),
        ("[models.a.buckets.4k-8k]\ndrift = {fail = 1.1}\n", "unknown drift"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, text, message):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        limits_for(["x"], "int8", file)
    assert "wrong.toml" in str(caught.value)


def test_dtypes_have_one_spelling():
    assert canonical_dtype("int8") == canonical_dtype("k:int8,v:int8") == canonical_dtype({"k": "int8", "v": "int8"})
    assert canonical_dtype("k:int8") == canonical_dtype({"k": "int8"}) == "k:int8,v:auto"
    for wrong in ("fp8", "k:int8,v:fp7", {}, {"k": "int8", "v": "int8", "q": "int8"}, "k:int8,v"):
        with pytest.raises(ValueError, match="kv_cache_dtype"):
            canonical_dtype(wrong)


def test_the_packages_own_file_is_whole_and_shipped():
    assert BUILT_IN.is_file()
    for model in ("demo", "hf-paged-small"):
        for dtype in ("fp8_e4m3", "int8"):
            limits = limits_for([model], dtype)
            assert f"[models.{'smollm2-135m' if model == 'demo' else 'small'}" in limits.source
            assert all(limit.fail is not None for limit in limits.overall.values())
