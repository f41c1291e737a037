"""Output of `te train` in files and pipes, extended runs, TensorBoard and shell completion."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.command import TINY
from tests.support.command import te as run_te
from transformer_engine.common import optional
from transformer_engine_tools.demo.records import read_metrics
from transformer_engine_tools.progress import printable


@pytest.fixture
def run(tmp_path: Path):
    """A function that calls `te train` on a tiny model named "tiny", with further options."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(500)))
    position = ["--device", "cpu", "--name", "tiny", "--out", str(tmp_path)]
    start = [*TINY, "--data", str(text), "--recipe", "none"]

    def train(*options: str):
        args = [] if "--resume" in options else start
        return run_te("train", *position, *args, *options, columns=80)

    return train


def test_lines_of_progress_are_printed_at_multiples_and_at_the_end(run):
    result = run("--log-every", "3")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["3/4", "4/4"]
    assert all(
        re.search(r"float32 \d\.\d{3}  [\d,]+ tokens/s  \d:\d\d:\d\d left$", line) for line in lines
    )


def test_line_every_twentieth_of_the_steps_by_default(run):
    lines = [line for line in run("--steps", "40").output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/40" for step in range(2, 41, 2)]


def test_finished_run_is_extended_and_continues_exactly(run, tmp_path: Path):
    assert run().exit_code == 0
    before = read_metrics(tmp_path / "tiny" / "metrics.jsonl")
    extended = run("--resume", "--steps", "6")
    assert extended.exit_code == 0, extended.output
    assert "resume  after step 4" in extended.output
    after = read_metrics(tmp_path / "tiny" / "metrics.jsonl")
    assert [record.step for record in after] == [1, 2, 3, 4, 5, 6] and after[:4] == before
    assert after[-1].validation is not None
    repeated = run("--resume", "--steps", "5")
    assert (
        repeated.exit_code == 2
        and "--steps 5 contradicts the checkpoint, which has 6" in repeated.output
    )


def test_interval_below_1_is_an_error(run, tmp_path: Path):
    result = run("--log-every", "0")
    assert result.exit_code == 2 and "--log-every 0 is below 1" in result.output
    assert not (tmp_path / "tiny").exists()


def test_tensorboard_receives_every_record_once(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    scalars: list[tuple[str, str, int]] = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            self.folder = Path(folder).name
            scalars.append((self.folder, "purge", purge_step))

        def add_scalar(self, name, value, step):
            scalars.append((self.folder, name, step))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(optional, "installed", lambda module: True)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    assert run("--tensorboard").exit_code == 0
    assert run("--resume", "--steps", "6", "--tensorboard").exit_code == 0
    assert [step for _, name, step in scalars if name == "train/float32"] == [1, 2, 3, 4, 5, 6]
    assert [step for _, name, step in scalars if name == "purge"] == [1, 5]
    assert {folder for folder, *_ in scalars} == {"tensorboard"}
    assert {"validation/float32", "learning rate"} <= {name for _, name, _ in scalars}


def test_missing_tensorboard_is_reported_before_training(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(optional, "installed", lambda module: module != "tensorboard")
    result = run("--tensorboard")
    assert result.exit_code == 1
    assert "--tensorboard needs tensorboard; pip install tensorboard" in result.output
    assert not (tmp_path / "tiny").exists()


def test_sample_is_text_without_control_characters_and_escapes():
    assert (
        printable(b"def f():\n\treturn 1\x07\xff\x1b[31m")
        == "def f():\n\treturn 1\ufffd\ufffd\ufffd[31m"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_have_commands_and_options(shell: str):
    pytest.importorskip("shtab")
    result = run_te("--completion", shell)
    assert result.exit_code == 0
    for word in ("train", "convert", "resume", "shard-size"):
        assert word in result.output
