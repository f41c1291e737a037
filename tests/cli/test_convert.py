"""`te convert` as its users see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conversion.tiny_models import write_checkpoint
from transformer_engine import cli


def te(*arguments: object):
    return CliRunner().invoke(cli.application(), ["convert", *map(str, arguments)], env={"COLUMNS": "200"})


def test_it_goes_both_ways_and_says_how_many_tensors_there_were(tmp_path: Path):
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    write_checkpoint(theirs, "llama", most=60_000)
    there = te(theirs, ours)
    assert there.exit_code == 0, there.output
    assert "21 tensors made 15" in there.output and "a TransformerLayer stack" in there.output
    again = te(ours, back, "--dtype", "bfloat16", "--shard-size", "0.00005")
    assert again.exit_code == 0, again.output
    assert "15 tensors made 21" in again.output and "llama of Hugging Face" in again.output
    assert (back / "model.safetensors.index.json").is_file()
    assert '"torch_dtype": "bfloat16"' in (back / "config.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("absent", "ours"), "there is no folder absent; give one that holds a checkpoint"),
        ((".", "ours", "--shard-size", "0"), "shard_size=0.0 is not a positive number"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(arguments, sentence: str):
    result = te(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {sentence}")
