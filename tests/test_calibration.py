"""calibrate_kv_scales: ranges are those of what caches hold, of all tokens alike, and the model stays as it was."""

import pytest
import tiny_models as tiny
import torch
from transformers.cache_utils import DynamicCache

import hf_paged
from hf_paged import KVScales, calibrate_kv_scales
from hf_paged.calibration import WIDTHS, _Errors
from hf_paged.kv_format import FormatPlan

QMAX = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
QUIET = {"progress_bar": False}
EXACT = {**QUIET, "margin": 1.0}
# Short enough that sliding layers of 8 tokens still hold all of them.
SHORT = tiny.prompts((5, 7, 6, 3))


def held(model, rows):
    """layer -> (keys, values) `[num_kv_heads, tokens, head_dim]` that plain caches hold of all rows."""
    found = {}
    for row in rows:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([row]), past_key_values=cache, use_cache=True)
        for i, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is not None:
                found.setdefault(i, []).append((layer.keys[0], layer.values[0]))
    return {i: tuple(torch.cat(side, dim=1) for side in zip(*pairs, strict=True)) for i, pairs in found.items()}


@pytest.mark.parametrize(
    "name", ["llama_gqa", "llama_mqa", "mistral_swa", "gemma3", "gpt2", "qwen3_next", "deepseek_v3", "gemma3n"]
)
def test_ranges_are_those_of_what_the_cache_holds(name):
    model = tiny.shared(name)
    scales = calibrate_kv_scales(model, SHORT, **EXACT)
    expected = held(model, SHORT)
    assert sorted(scales.key) == sorted(scales.value) == sorted(expected)
    for i, sides in expected.items():
        for scale, states in zip(scales.layer(i), sides, strict=True):
            torch.testing.assert_close(scale, states.abs().amax(dim=(1, 2)) / QMAX["fp8_e4m3"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", QMAX)
def test_granularities(dtype):
    model = tiny.shared("llama_gqa")
    key, value = held(model, SHORT)[1]
    by_kind = {
        "per_tensor": (key.abs().amax(), value.abs().amax()),
        "per_head": (key.abs().amax(dim=(1, 2)), value.abs().amax(dim=(1, 2))),
        "k:per_channel,v:per_head": (key.abs().amax(dim=1), value.abs().amax(dim=(1, 2))),
    }
    for kind, expected in by_kind.items():
        scales = calibrate_kv_scales(model, SHORT, kv_cache_dtype=dtype, kv_scale_granularity=kind, **EXACT)
        for got, want in zip(scales.layer(1), expected, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, want / QMAX[dtype], rtol=1e-5, atol=0)


def test_only_sides_that_need_scales():
    model = tiny.shared("llama_gqa")
    scales = calibrate_kv_scales(model, SHORT, kv_scale_granularity="k:per_channel,v:per_token_head", **QUIET)
    assert scales.layer(0)[0].shape == (2, 16) and scales.layer(0)[1] is None and scales.value_dtype is None
    scales = calibrate_kv_scales(
        model, SHORT, kv_cache_dtype="v:int8", kv_scale_granularity="k:per_token_head,v:per_head", **QUIET
    )
    assert scales.layer(0)[0] is None and scales.value_dtype == "int8"


def test_order_and_first_text_do_not_matter():
    model = tiny.shared("llama_gqa")
    digest = calibrate_kv_scales(model, SHORT, **QUIET).digest()
    assert calibrate_kv_scales(model, SHORT[::-1], **QUIET).digest() == digest
    assert calibrate_kv_scales(model, [SHORT[1][:1], *SHORT], **QUIET).digest() == digest


def test_padding_is_left_out():
    model = tiny.shared("llama_gqa")
    ids, mask = tiny.padded(SHORT)
    rows = [{"input_ids": row, "attention_mask": real} for row, real in zip(ids, mask, strict=True)]
    assert calibrate_kv_scales(model, rows, **QUIET).digest() == calibrate_kv_scales(model, SHORT, **QUIET).digest()


class Words:
    """A tokenizer of words w3, w4 ..."""

    def __call__(self, text, truncation, max_length):
        return {"input_ids": [int(word[1:]) for word in text.split()][:max_length]}


def test_kinds_of_data_sets():
    model = tiny.shared("llama_gqa")
    digest = calibrate_kv_scales(model, SHORT, **QUIET).digest()
    texts = [" ".join(f"w{token}" for token in row) for row in SHORT]
    forms = {
        "tensors": ([torch.tensor(row) for row in SHORT], {}),
        "a generator": ((row for row in SHORT), {}),
        "texts": (["", *texts], {"tokenizer": Words()}),
        "rows": ([{"text": text} for text in texts], {"tokenizer": Words()}),
        "another column": ([{"body": text} for text in texts], {"tokenizer": Words(), "text_column": "body"}),
    }
    for form, (data, more) in forms.items():
        assert calibrate_kv_scales(model, data, **more, **QUIET).digest() == digest, form
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": texts})
    assert calibrate_kv_scales(model, data, tokenizer=Words(), **QUIET).digest() == digest


def test_how_much_is_taken():
    model = tiny.shared("llama_gqa")
    scales = calibrate_kv_scales(model, SHORT, num_samples=2, max_length=4, **QUIET)
    assert scales.digest() == calibrate_kv_scales(model, [row[:4] for row in SHORT[:2]], **QUIET).digest()
    assert scales.calibration["samples"] == 2 and scales.calibration["tokens"] == 8


def rounded(x, scale, dtype):
    """What codes with fixed scales, for all, for each head or for each channel, leave of `x [..., heads, T, dim]`."""
    scale = scale[:, None] if scale.dim() == 2 else scale.reshape(-1, 1, 1)
    codes = (x / scale).clamp(-QMAX[dtype], QMAX[dtype])
    return (codes.round() if dtype == "int8" else codes.to(TORCH[dtype]).float()) * scale


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "k:per_channel,v:per_head"])
@pytest.mark.parametrize("dtype", QMAX)
def test_ranges_of_least_error_never_err_more(dtype, granularity):
    """The squared error of codes on the calibration data, measured with torch alone."""
    model, rows = tiny.shared("llama_gqa"), tiny.prompts((40, 33, 20))
    states = held(model, rows)
    settings = {"kv_cache_dtype": dtype, "kv_scale_granularity": granularity, **EXACT}
    amax, mse = (
        [
            float((rounded(x, scale, dtype) - x).square().sum())
            for i, sides in states.items()
            for scale, x in zip(scales.layer(i), sides, strict=True)
        ]
        for scales in (calibrate_kv_scales(model, rows, method=method, **settings) for method in ("amax", "mse"))
    )
    assert all(b <= a * (1 + 1e-5) for a, b in zip(amax, mse, strict=True))
    assert dtype == "int8" or sum(mse) < sum(amax)  # int8 has equal steps, and this data no outliers


def test_outliers_are_clipped_where_that_errs_less():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4000, 16, generator=generator)
    x[0, 0, 7, 3] = 12  # in one head only
    largest = x.abs().amax(dim=(0, 2, 3))
    errors = _Errors(FormatPlan.of("int8", "per_head", (), "file").format_of(0), {"key": {0: largest}, "value": {}})
    for part in x.split(1500, dim=2):
        errors.see("key", 0, part)
        errors.see("value", 0, part)  # which no range is wanted of
    best = errors.best()
    tried = [(rounded(x[0], largest * width / 127, "int8") - x[0]).square().sum(dim=(1, 2)) for width in WIDTHS]
    assert best["value"] == {}
    chosen = [float(largest[head]) * WIDTHS[int(torch.stack(tried)[:, head].argmin())] for head in (0, 1)]
    assert best["key"][0].tolist() == pytest.approx(chosen)
    assert best["key"][0][0] < largest[0]


def test_margin():
    model = tiny.shared("llama_gqa")

    def key_and_value(kind, **more):
        scales = calibrate_kv_scales(
            model, SHORT, kv_cache_dtype=kind[0], kv_scale_granularity=kind[1], **more, **QUIET
        )
        return scales.layer(0)

    channels = "k:per_channel,v:per_head"
    for kind, method, expected in (
        (("fp8_e4m3", "per_head"), "amax", (1.25, 1.25)),
        (("int8", channels), "amax", (1.1, 1.0)),
        (("k:int8,v:fp8_e5m2", channels), "amax", (1.1, 1.25)),
        (("fp8_e4m3", "per_tensor"), "mse", (1.0, 1.0)),
    ):
        plain, default, wide = (key_and_value(kind, method=method, margin=margin) for margin in (1.0, None, 2))
        for side, factor in enumerate(expected):
            torch.testing.assert_close(default[side], plain[side] * factor)
            torch.testing.assert_close(wide[side], plain[side] * 2)


def test_a_silent_channel_keeps_a_usable_range():
    model = tiny.build("llama_gqa")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:16] = 0  # all of head 0
    scales = calibrate_kv_scales(model, SHORT, **QUIET)
    silent, loud = scales.layer(0)[1].tolist()
    assert silent == pytest.approx(loud / 256)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    assert torch.all(calibrate_kv_scales(model, SHORT, **QUIET).layer(0)[1] > 0)


def test_the_model_stays_as_it_was():
    model = tiny.build("llama_gqa")
    model.train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    weights = [weight.clone() for weight in model.parameters()]
    scales = calibrate_kv_scales(model, SHORT, **QUIET)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())
    assert scales.digest() == calibrate_kv_scales(tiny.build("llama_gqa"), SHORT, **QUIET).digest()


def test_modes_come_back_after_an_error():
    model = tiny.build("llama_gqa").train()
    with pytest.raises(IndexError):
        calibrate_kv_scales(model, [[tiny.VOCAB + 5]], **QUIET)
    assert model.training and all(module.training for module in model.modules())


def test_output_and_progress(tmp_path, capsys):
    model = tiny.build("llama_gqa")
    path = tmp_path / "scales.safetensors"
    scales = calibrate_kv_scales(model, SHORT, output=path)
    assert "Calibrating" in capsys.readouterr().err
    read = KVScales.load(path)
    assert read.digest() == scales.digest()
    read.check(model)
    with pytest.raises(ValueError, match="another model"):
        read.check(tiny.build("llama_gqa", seed=4))
    calibrate_kv_scales(model, SHORT, **QUIET)
    assert "Calibrating" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ([], {}, "no token"),
        ([[]], {}, "no token"),
        ("one text", {}, "several texts"),
        (["a text"], {}, "tokenizer"),
        ([{"body": "a"}], {}, "neither input_ids nor 'text'"),
        ([5, 6], {}, "row 0"),
        ([[1.5]], {}, "row 0"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], {}, "attention_mask has 1"),
        (SHORT, {"num_samples": 0}, "num_samples"),
        (SHORT, {"max_length": 0}, "max_length"),
        (SHORT, {"method": "best"}, "method"),
        (SHORT, {"margin": 0}, "margin"),
        (SHORT, {"kv_cache_dtype": "auto"}, "auto"),
        (SHORT, {"kv_scale_granularity": "per_token_head"}, "needs no calibration"),
        (SHORT, {"kv_scale_granularity": "per_channel"}, "per_channel"),
        (SHORT, {"kv_cache_dtype": "fp4"}, "fp4"),
    ],
)
def test_errors(data, more, said):
    with pytest.raises(ValueError, match=said):
        calibrate_kv_scales(tiny.shared("llama_gqa"), data, **more, **QUIET)


def test_numbers_that_are_not_finite():
    model = tiny.build("llama_gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 1 gives keys that are not finite"):
        calibrate_kv_scales(model, SHORT, **QUIET)


# Used by a cache


class Fixed(DynamicCache):
    """A DynamicCache that holds what fixed int8 scales leave of keys and values."""

    def __init__(self, config, scales):
        super().__init__(config=config)
        self.scales = scales

    def update(self, key, value, layer_idx, *args, **kwargs):
        sides = zip((key, value), self.scales.layer(layer_idx), strict=True)
        return super().update(*(rounded(x, scale, "int8") for x, scale in sides), layer_idx, *args, **kwargs)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "k:per_channel,v:per_head"])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mistral_swa", "deepseek_v3"])
def test_a_cache_with_fixed_scales_is_one_of_what_they_leave(tmp_path, name, granularity):
    model, path = tiny.build(name), tmp_path / "s"
    rows = tiny.prompts((33, 40, 21), seed=9)
    settings = {"kv_cache_dtype": "int8", "kv_scale_granularity": granularity}
    scales = calibrate_kv_scales(model, rows, **settings, output=path, **QUIET)
    for length in (1, 7, 20):  # and whatever was served before: scales do not come from it
        ids = torch.tensor([rows[0][:length]])
        arguments = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        want = model.generate(ids, past_key_values=Fixed(model.config, scales), **arguments)
        got = model.generate(
            ids,
            cache_implementation="paged",
            cache_config={**settings, "kv_scales": path, "block_size": 4},
            **arguments,
        )
        assert got.sequences.tolist() == want.sequences.tolist()
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=2e-3, atol=2e-3)


def test_a_cache_refuses_scales_of_another_model(tmp_path):
    path = tmp_path / "s"
    calibrate_kv_scales(tiny.build("llama_gqa"), SHORT, output=path, **QUIET)
    settings = {"kv_cache_dtype": "fp8_e4m3", "kv_scale_granularity": "per_head", "kv_scales": path}
    with pytest.raises(ValueError, match="another model"):
        hf_paged.PagedCache(tiny.config("qwen2"), settings)
    with pytest.raises(ValueError, match="another model"):
        hf_paged.ContinuousBatcher(tiny.build("llama_gqa", seed=1), cache_config=settings)
