"""The console script: usage, errors in one line, one small generation."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_paged.cli import app

runner = CliRunner()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny random llama with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(47))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def generate(*arguments):
    return runner.invoke(app, ["generate", *arguments])


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("hf-paged ")


def test_commands_are_listed():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output and "generate" in result.output


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prompt", "w1", "--max-new-tokens", "0"], ["--prompt", "w1", "--temperature", "0.5"]],
    ids=["no prompt", "no new tokens", "temperature without --sample"],
)
def test_wrong_usage(tiny, arguments):
    assert generate(tiny, *arguments).exit_code == 2


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    result = generate(str(tmp_path / "nothing"), "--prompt", "w1")
    assert result.exit_code == 1
    assert "error: " in result.output and "Traceback" not in result.output


def test_generates_for_prompts_of_a_file_and_of_options(tiny, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("w1 w2 w3\n\nw4\n")
    result = generate(tiny, "--prompt", "w5 w6", "--prompts-file", str(file), "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
    for prompt in ("w5 w6", "w1 w2 w3", "w4"):
        assert f"> {prompt}\n" in result.output


def test_sampling_repeats_with_a_seed(tiny):
    command = [tiny, "--prompt", "w1 w2", "--sample", "--temperature", "2.0", "--seed", "7", "--block-size", "3"]
    first, second = generate(*command), generate(*command)
    assert first.exit_code == 0, first.output
    answers = [[line for line in r.stdout.splitlines() if line.startswith("w")] for r in (first, second)]
    assert answers[0] == answers[1] and answers[0]


def test_raw_prompts_unless_the_model_can_chat(tiny):
    result = generate(tiny, "--prompt", "w1", "--chat")
    assert result.exit_code == 1 and "chat template" in result.output
