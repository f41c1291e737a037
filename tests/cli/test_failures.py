"""Errors outside of the program are one sentence that names the file and the remedy, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import TINY, te
from tests.support.programs import search_path
from transformer_engine_tools.demo import checkpoint, records


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text\n" for i in range(500)))
    return str(path)


@pytest.fixture(scope="module")
def finished(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    result = te(
        "train", *TINY, "--data", text, "--device", "cpu", "--out", str(out), "--recipe", "current"
    )
    assert result.exit_code == 0, result.output
    return out / "current"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The folder of a finished run, which the tests damage."""
    return Path(shutil.copytree(finished, tmp_path / "current"))


def assert_rejected(result: Any, *words: str) -> None:
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert "error:" in result.output
    for word in words:
        assert word in result.output, result.output


def rewrite_checkpoint(**values: Any) -> Callable[[Path], None]:
    """Return a function that rewrites a checkpoint with some of its content replaced."""

    def write(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        torch.save({**state, **values}, path)

    return write


def with_config(**values: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        state["config"].update(values)
        torch.save(state, path)

    return write


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def with_smaller_tensor(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    model = state["runs"]["current"]["model"]
    name = next(name for name in model if not name.endswith("_extra_state"))
    model[name] = model[name][:1].clone()
    torch.save(state, path)


def remove_moments(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["runs"]["current"]["optimizer"]["masters"] = []
    torch.save(state, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "pickle": lambda path: path.write_bytes(b"\x80\x04K\x01."),
    "cut": cut,
    "flipped": flip_byte,
    "tensor": lambda path: torch.save(torch.zeros(3), path),
    "class": lambda path: torch.save(Path("anything"), path),
    "other dict": lambda path: torch.save({"model": {}}, path),
    "step of a wrong type": rewrite_checkpoint(step="four"),
    "step below zero": rewrite_checkpoint(step=-1),
    "config of a wrong type": rewrite_checkpoint(config=[1, 2]),
    "config without fields": rewrite_checkpoint(config={}),
    "layers of a wrong type": with_config(layers="many"),
    "layers of another number": with_config(layers=2),
    "recipe that does not exist": with_config(recipe="fp3"),
    "random of a wrong type": rewrite_checkpoint(random={"cpu": [1, 2]}),
    "random of another size": rewrite_checkpoint(random={"cpu": torch.zeros(3, dtype=torch.uint8)}),
    "runs of a wrong type": rewrite_checkpoint(runs={"current": 3}),
    "no runs": rewrite_checkpoint(runs={}),
    "a tensor of another shape": with_smaller_tensor,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_and_generate_name_an_invalid_checkpoint(damage: str, run: Path):
    DAMAGE[damage](run / "checkpoint")
    before = (run / "checkpoint").read_bytes()
    metrics = (run / "metrics.jsonl").read_bytes()
    assert_rejected(
        te("train", "--resume", "--name", "current", "--out", str(run.parent)), "checkpoint"
    )
    assert (run / "checkpoint").read_bytes() == before
    assert (run / "metrics.jsonl").read_bytes() == metrics
    if damage not in ("step of a wrong type", "step below zero"):
        assert_rejected(
            te("generate", "--name", "current", "--out", str(run.parent), "--device", "cpu")
        )


def test_an_optimizer_of_another_model_is_rejected(run: Path):
    remove_moments(run / "checkpoint")
    assert_rejected(
        te("train", "--resume", "--name", "current", "--out", str(run.parent)),
        "checkpoint",
        "master weights",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json}\n", ("line 2", "not JSON")),
        ('{"step": 2}\n', ("line 2", "learning_rate")),
        ("[1, 2]\n", ("line 2",)),
        ('{"step": "2", "learning_rate": 0.1, "loss": {}, "seconds": {}}\n', ("line 2", "step")),
        (
            '{"step": 2, "learning_rate": 0.1, "loss": {"a": "b"}, "seconds": {}}\n',
            ("line 2", "loss"),
        ),
        (
            '{"step": 2, "learning_rate": 0.1, "loss": {"other": 1.0}, "seconds": {"other": 1.0}}\n',
            ("other runs",),
        ),
        ("\udcff\n", ("cannot be read",)),
    ],
)
def test_a_damaged_line_of_the_metrics_is_named(line: str, words: tuple[str, ...], run: Path):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_bytes("".join([lines[0], line, *lines[2:]]).encode(errors="surrogateescape"))
    assert_rejected(
        te("train", "--resume", "--name", "current", "--out", str(run.parent)),
        "metrics.jsonl",
        *words,
    )


def test_a_finished_run_without_metrics_has_nothing_to_draw(run: Path):
    (run / "metrics.jsonl").unlink()
    assert_rejected(
        te("train", "--resume", "--name", "current", "--out", str(run.parent)), "metrics.jsonl"
    )


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_old_checkpoint_and_names_the_path(
    run: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = (run / "checkpoint").read_bytes()
    monkeypatch.setattr(checkpoint.os, "fsync", full)
    arguments = ["--data", text, "--device", "cpu", "--out", str(tmp_path), "--recipe", "current"]
    assert_rejected(
        te("train", *TINY, *arguments, "--overwrite"),
        str(run / "checkpoint"),
        "No space left",
        "--out",
    )
    assert (run / "checkpoint").read_bytes() == before
    assert not (run / "checkpoint.partial").exists()


def test_an_error_of_torch_on_a_full_disk_reports_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save(state: Any, file: Any) -> None:
        try:
            full()
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 - as torch's writer does

    monkeypatch.setattr(checkpoint.torch, "save", save)
    with pytest.raises(Exception, match="No space left") as raised:
        checkpoint.save(tmp_path / "checkpoint", {})
    assert str(tmp_path / "checkpoint") in str(raised.value)


@pytest.mark.parametrize("what", ["plot", "metrics"])
def test_a_full_disk_under_other_files_is_a_sentence(
    what: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if what == "plot":
        monkeypatch.setattr("transformer_engine_tools.demo.plot.plot_losses", full)
    else:
        monkeypatch.setattr(records.Progress, "as_json", full)
    out = ["--data", text, "--device", "cpu", "--out", str(tmp_path), "--recipe", "none"]
    assert_rejected(
        te("train", *TINY, *out), "loss.png" if what == "plot" else "metrics.jsonl", "No space left"
    )


def test_an_out_folder_that_is_a_file_is_named(text: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert_rejected(
        te("train", *TINY, "--data", text, "--device", "cpu", "--out", str(tmp_path / "file")),
        "file",
        "--out",
    )


def test_a_text_that_cannot_be_read_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def deny(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert_rejected(
        te("train", *TINY, "--data", text, "--device", "cpu", "--out", str(tmp_path)),
        text,
        "Permission denied",
    )


def test_a_text_with_an_impossible_name_is_rejected(tmp_path: Path):
    assert_rejected(te("train", *TINY, "--data", "x" * 5000, "--out", str(tmp_path)), "--data")


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temperature", "-1"],
        ["--count", "0"],
        ["--count", "100000"],
        ["--page-size", "-1"],
        ["--seed", str(2**70)],
        ["--name", "absent"],
    ],
    ids=" ".join,
)
def test_a_bad_option_of_generate_is_rejected(options: list[str], run: Path):
    named = [] if "--name" in options else ["--name", "current"]
    assert_rejected(
        te("generate", "x", *named, "--out", str(run.parent), "--device", "cpu", *options),
        options[1][:12],
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", str(2**70)],
        ["--seed", str(-(2**40))],
        ["--lr", "nan"],
        ["--heads", "0"],
        ["--steps", "-1"],
        ["--batch", "0"],
    ],
    ids=" ".join,
)
def test_a_bad_option_of_train_is_rejected(options: list[str], text: str, tmp_path: Path):
    arguments = [*TINY, "--data", text, "--device", "cpu", "--out", str(tmp_path), *options]
    assert_rejected(te("train", *arguments), options[1])


@pytest.mark.parametrize("content", ["[3]", '{"results": 3}', '[{"case": [1]}]', "\udcff", "{"])
def test_invalid_figures_are_named(content: str, tmp_path: Path):
    path = tmp_path / "figures.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert_rejected(
        te("bench", "--compare", str(path), str(path)), "figures.json", "te bench --json"
    )


def test_figures_without_a_ratio_are_left_out(tmp_path: Path):
    path = tmp_path / "figures.json"
    rows = [{"case": "gemm/a", "gpu_ms": -1.0, "cpu_ms": True}, {"case": "gemm/b", "gpu_ms": 2.0}]
    path.write_text(json.dumps(rows))
    assert te("bench", "--compare", str(path), str(path)).exit_code == 0


@pytest.mark.parametrize(
    "options", [["--json", "."], ["--plot-dir", __file__], ["--json", "absent/a.json"]]
)
def test_a_place_that_bench_cannot_write_to_is_rejected_before_measuring(options: list[str]):
    assert_rejected(te("bench", "--quick", "--family", "norm", *options), options[0])


def module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transformer_engine", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search_path(), **environment},
        timeout=300,
        check=False,
    )


def test_the_package_runs_as_te():
    result = module("--help")
    assert result.returncode == 0, result.stderr
    for command in ("train", "generate", "info", "doctor", "bench"):
        assert command in result.stdout


def test_training_without_matplotlib_names_the_extra_before_it_starts(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
    )
    result = module("train", "--out", str(tmp_path / "runs"), PYTHONPATH=search_path(tmp_path))
    assert result.returncode == 1
    assert (
        "needs matplotlib" in result.stdout
        and 'pip install ".[cli]" in a checkout' in result.stdout
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("NVTE_BACKWARD_OVERRIDE", "low"), ("NVTE_FLASH_ATTN", "maybe"), ("TE_CHECK", "3")],
)
def test_a_bad_value_of_the_environment_is_a_sentence(name: str, value: str):
    result = module("info", **{name: value})
    assert result.returncode == 1
    assert f"error: {name}={value!r} is not" in result.stderr
    assert "unset it" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["a/b", "..", "/absolute", "a\\b"])
def test_a_name_that_is_a_path_is_rejected_and_nothing_is_written(
    name: str, text: str, tmp_path: Path
):
    out = tmp_path / "runs"
    assert_rejected(
        te("train", *TINY, "--data", text, "--device", "cpu", "--out", str(out), "--name", name),
        "--name",
        "is a path",
        "pass a name without separators",
    )
    assert not [*tmp_path.iterdir()]
