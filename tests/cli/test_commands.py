"""The `te` command as its users see it: files, messages and exit codes."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_engine_tools as tools
from tests.support.command import TINY, te
from transformer_engine import __version__
from transformer_engine_tools.demo import config
from transformer_engine_tools.demo.records import read_metrics
from transformer_engine_tools.demo.trainer import Trainer
from transformer_engine_tools.options import Parser


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text\n" for i in range(500)))
    return str(path)


def training(text: str, out: Path, recipe: str) -> list[str]:
    """The arguments of a command that trains a tiny model on a text."""
    where = ("--data", text, "--device", "cpu", "--out", str(out))
    return ["train", *TINY, *where, "--recipe", recipe]


def test_train_writes_the_three_files_and_prints_a_table_and_a_sample(text: str, tmp_path: Path):
    out = tmp_path / "runs"
    result = te(*training(text, out, "current"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (out / "current").iterdir()} == {
        "loss.png",
        "metrics.jsonl",
        "checkpoint",
    }
    for expected in (
        "validation loss",
        "ratio",
        "tokens/s",
        "sample of the current model",
        "float32",
    ):
        assert expected in result.output
    records = [
        json.loads(line) for line in (out / "current" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert set(records[-1]["validation"]) == {"current", "high_precision"}


def test_ctrl_c_saves_and_prints_how_to_continue(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = training(text, tmp_path, "none")
    advance = Trainer._advance

    def interrupted(trainer: Trainer):
        if trainer.step == 1:
            signal.raise_signal(signal.SIGINT)
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_advance", interrupted)
        stopped = te(*arguments, "--name", "mine")
    assert stopped.exit_code == 130
    assert "stopped after step 2 of 4" in stopped.output
    assert f"-m transformer_engine train --resume --name mine --out {tmp_path}" in stopped.output
    resumed = te("train", "--resume", "--name", "mine", "--out", str(tmp_path))
    assert resumed.exit_code == 0, resumed.output
    assert [record.step for record in read_metrics(tmp_path / "mine" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]


def test_a_run_is_replaced_only_on_request(text: str, tmp_path: Path):
    arguments = training(text, tmp_path, "none")
    assert te(*arguments).exit_code == 0
    run = tmp_path / "none"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    repeated = te(*arguments, "--seed", "1")
    assert repeated.exit_code == 2
    assert f"{run} holds the checkpoint of an earlier run" in repeated.output
    assert (
        "--name" in repeated.output
        and "--resume" in repeated.output
        and "--overwrite" in repeated.output
    )
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert te(*arguments, "--seed", "1", "--overwrite").exit_code == 0
    assert (run / "metrics.jsonl").read_bytes() != before["metrics.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "--overwrite"], "--resume continues a run and --overwrite replaces it"),
        (["--data", "/nonexistent"], "--data /nonexistent: there is no such file or folder"),
        (["--hidden", "100"], "--hidden 100 is not a positive multiple of 32; try 96"),
        (["--resume", "--name", "absent"], "there is no checkpoint at"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
):
    result = te("train", "--device", "cpu", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_without_torch_a_command_prints_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        tools.main(["info"])
    assert (
        stopped.value.code
        == 'te info needs torch; install with pip install ".[cli]" in a checkout of this package'
    )


def test_help_of_every_command_works_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    for name, command in tools.COMMANDS.items():
        with pytest.raises(SystemExit) as end:
            tools.main([name, "--help"])
        assert not end.value.code
        assert command.summary[:40] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "framework"),
    [("", "torch"), ("torch", "torch"), ("jax", "jax"), ("torch jax", "torch")],
)
def test_jax_is_the_default_framework_only_where_it_is_the_only_one(
    installed: str, framework: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config.optional, "installed", lambda name: name in installed.split())
    assert config.default_framework() == framework


HELP = [["--help"], ["--version"], *([command, "--help"] for command in tools.COMMANDS)]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_and_version_import_no_framework(arguments: list[str]):
    program = (
        "import sys\n"
        "from transformer_engine_tools import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(sorted({'torch', 'jax', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    listing = done.stdout.splitlines()
    assert listing[-1] == "[]"
    if arguments == ["--version"]:
        assert listing[0] == __version__
    elif arguments == ["--help"]:
        assert all(name in done.stdout for name in tools.COMMANDS)
    else:
        assert listing[0].startswith("usage: ") and arguments[0] in listing[0]


def test_version_is_printed_without_any_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["te", "--version"])
    with pytest.raises(SystemExit) as end:
        tools.main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("name", tools.COMMANDS)
def test_summary_of_a_command_is_the_first_paragraph_of_its_documentation(name: str):
    command = tools.COMMANDS[name]
    module = importlib.import_module(command.module, tools.__name__)
    assert " ".join(inspect.getdoc(module.run).split("\n\n")[0].split()) == command.summary
    assert command.summary.split(",")[0] in " ".join(te(name, "--help").output.split())


@pytest.mark.parametrize("name", tools.COMMANDS)
def test_help_states_the_type_or_the_choices_of_every_value(name: str):
    """argparse's own placeholder repeats the name of the option."""
    listing = re.findall(r"^  --([a-z-]+) (\S+)", te(name, "--help").output, re.MULTILINE)
    assert [
        f"--{option} {value}"
        for option, value in listing
        if value == option.upper().replace("-", "_")
    ] == []


@pytest.mark.parametrize("name", tools.COMMANDS)
def test_examples_in_a_help_are_valid_calls(name: str):
    command = tools.COMMANDS[name]
    parser = Parser(f"te {name}", command.summary)
    importlib.import_module(command.module, tools.__name__).add_arguments(parser)
    listing = te(name, "--help").output
    assert command.examples
    for example in command.examples:
        parser.parse_args(shlex.split(example))
        assert f" {name} {example}\n" in listing


def test_examples_in_the_overview_are_commands():
    listing = te("--help").output
    for example in tools.OVERVIEW:
        assert example.split()[0] in tools.COMMANDS and f" {example}\n" in listing


@pytest.mark.parametrize(
    ("arguments", "positional"),
    [
        ([], " COMMAND"),
        (["plan"], ""),
        (["convert"], " source folder"),
        (["generate"], " [prompt]"),
    ],
)
def test_usage_lists_the_positional_arguments(arguments: list[str], positional: str):
    usage = te(*arguments, "--help").output.splitlines()[0]
    assert usage.endswith(f"[options]{positional}")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["bnech"], "did you mean bench?"),
        (["bench", "--famly", "linear"], "did you mean --family?"),
        (["bench", "--famly=linear"], "did you mean --family?"),
        (["train", "--recipe", "delay"], "did you mean delayed?"),
        (["bench", "--zzz"], "unrecognized arguments: --zzz; "),
        (["plan", "--devces", "8"], "did you mean --devices?"),
        (["convert", "--dtpe=bfloat16"], "did you mean --dtype?"),
    ],
)
def test_a_misspelt_option_or_choice_is_answered_with_the_right_one(
    arguments: list[str], remedy: str
):
    result = te(*arguments)
    assert result.exit_code == 2
    assert remedy in result.output and result.output.rstrip().endswith("--help lists all options")
