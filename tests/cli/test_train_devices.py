"""`te train` on several ranks: losses equal to one device, and continuation after a rank is killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from tests.support.command import te as run_te
from tests.support.programs import search_path
from transformer_engine_tools.demo import sharded_checkpoint
from transformer_engine_tools.demo import trainer as trainers
from transformer_engine_tools.demo.config import HIGH_PRECISION, Execution, RunConfig, resolve
from transformer_engine_tools.demo.data import load_corpus
from transformer_engine_tools.demo.parallel import Parallelism, Ranks
from transformer_engine_tools.demo.records import read_metrics
from transformer_engine_tools.demo.run import Run
from transformer_engine_tools.demo.trainer import Trainer
from transformer_engine_tools.devices import join_group

SIZES: dict[str, Any] = {
    "steps": 12, "batch": 2, "sequence": 32, "layers": 1, "hidden": 32, "heads": 2, "optimizer": "fused_adam",
}  # fmt: skip
TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(300))
LAYOUTS = {"tp": {"tp": 2}, "cp": {"cp": 2}, "fsdp": {"fsdp": 2}, "data": {}}


def tiny(data: Path | str, recipe: str = "delayed") -> RunConfig:
    return resolve("cpu", {**SIZES, "recipe": recipe, "data": str(data)})


def file_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path


class LossesOnRanks:
    """Three losses per layout on two ranks, and the losses on one device."""

    def __init__(self, data: str) -> None:
        self.data = data

    def __call__(self, device: torch.device) -> dict[str, list[float]]:
        config = tiny(self.data, "none")
        corpus = load_corpus(self.data, config.sequence)
        batches = [corpus.batch(0, step, config.batch, config.sequence) for step in range(3)]
        rates = [1e-2] * 3
        results = {"one": Run(HIGH_PRECISION, config).train(batches, rates, 0)}
        for name, sizes in LAYOUTS.items():
            ranks = Ranks(Parallelism(2, **sizes), device)
            run = ranks.Run(HIGH_PRECISION, config, Execution())
            results[name] = run.train(batches, rates, 0)
            results[f"{name} parameters"] = [run.parameters]
        return results


def test_every_layout_has_the_losses_of_one_device(tmp_path: Path):
    first, second = run_on_ranks(LossesOnRanks(str(file_text(tmp_path))), 2, tmp_path)
    assert first == second
    one = torch.tensor(first["one"])
    assert one[2] < one[0] - 0.05
    for name in LAYOUTS:
        # float32 sums in another order, three steps of Adam
        torch.testing.assert_close(torch.tensor(first[name]), one, rtol=2e-5, atol=2e-5)
        assert first[f"{name} parameters"] == first["data parameters"]


class TrainedOnRanks:
    """Records from an undisturbed run, and from a run that stops and continues from its checkpoint."""

    def __init__(self, data: str, folder: str, sizes: dict[str, int]) -> None:
        self.data, self.folder, self.sizes = data, folder, sizes

    def __call__(self, device: torch.device) -> list[Any]:
        trainers.EVALUATION_BATCHES = 1  # of 32, which take most of the run's time
        config = tiny(self.data)
        corpus = load_corpus(self.data, config.sequence)
        ranks = Ranks(Parallelism(2, **self.sizes), device)

        def trainer(name: str) -> Trainer:
            folder = Path(self.folder) / name
            return Trainer(config, corpus, folder, Execution(), ranks)

        full = trainer("whole")
        assert full.train()
        first = trainer("parts")
        assert not first.train(stop=lambda: first.step >= 5)
        second = trainer("parts")
        second.load(ranks.load(sharded_checkpoint.latest(second.folder)))
        assert second.step == 5
        assert second.train()
        return [[(r.step, r.loss, r.validation) for r in one.history] for one in (full, second)]


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(sizes: dict[str, int], tmp_path: Path):
    body = TrainedOnRanks(str(file_text(tmp_path)), str(tmp_path / "runs"), sizes)
    for full, resumed in run_on_ranks(body, 2, tmp_path):
        assert len(full) == SIZES["steps"]
        assert resumed == full
    (only,) = (tmp_path / "runs" / "parts" / "checkpoints").iterdir()
    assert only.name == "step_00000012"


def workers(launcher: int) -> list[int]:
    """Rank processes that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_an_attempt_does_not_see_the_store_of_the_one_before(monkeypatch: pytest.MonkeyPatch):
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    values = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with join_group("cpu"):
            store = dist.distributed_c10d._get_default_store()
            assert not store.check(["address"])
            store.set("address", "of this attempt")
            total = torch.ones(2)
            dist.all_reduce(total)
            assert total.tolist() == [1, 1]
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes of Linux")
def test_a_run_continues_after_a_rank_is_killed(tmp_path: Path):
    data = file_text(tmp_path)
    sizes = "--devices 2 --fsdp 2 --device cpu --steps 20 --batch 2 --seq 32 --layers 1 --hidden 32 --heads 2"
    command = [
        sys.executable,
        "-m",
        "transformer_engine",
        "train",
        *sizes.split(),
        "--recipe",
        "delayed",
    ]
    command += ["--data", str(data), "--out", str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    options: dict[str, Any] = {"text": True, "env": environment, "stdout": subprocess.PIPE}
    assert (
        subprocess.run(
            [*command, "--name", "whole"], check=False, timeout=500, **options
        ).returncode
        == 0
    )
    with subprocess.Popen([*command, "--name", "killed"], **options) as process:
        deadline = time.monotonic() + 400
        while (
            sharded_checkpoint.latest(tmp_path / "killed") is None and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        os.kill(workers(process.pid)[-1], signal.SIGKILL)
        printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    assert "resume  after step" in printed
    full, killed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed"))
    assert [r.step for r in killed] == list(range(1, 21))
    assert [(r.loss, r.validation) for r in killed] == [(r.loss, r.validation) for r in full]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], "add --devices or --distributed"),
        (["--distributed"], "--distributed needs the processes of torchrun"),
        (["--devices", "3", "--tp", "2"], "does not divide 3 devices"),
        (
            ["--devices", "3", "--fsdp", "3", "--batch", "8"],
            "--batch 8 is not divisible by 3 groups of ranks",
        ),
        (["--devices", "8", "--tp", "8"], "--heads 4 is not divisible by 8"),
        (["--devices", "2", "--fsdp", "2", "--experts", "4"], "several devices train dense models"),
    ],
)
def test_options_that_cannot_work_are_rejected_before_processes_start(
    options: list[str], message: str, tmp_path: Path
):
    position = ["--device", "cpu", "--out", str(tmp_path)]
    result = run_te("train", *position, *options)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not any(tmp_path.iterdir())


class Exploit:
    """Would create a file when unpickled by an unrestricted loader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_hostile_metadata_runs_nothing(tmp_path: Path):
    evidence = tmp_path / "evidence"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Exploit(evidence)))
    with pytest.raises(ValueError, match="is not a checkpoint of te train"):
        sharded_checkpoint.read_tensors(tmp_path, {})
    assert not evidence.exists()


def test_an_incomplete_checkpoint_is_not_found(tmp_path: Path):
    assert sharded_checkpoint.latest(tmp_path) is None
    for name in ("step_00000002", "step_00000010", "step_00000012.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    result = sharded_checkpoint.latest(tmp_path)
    assert result is not None and result.name == "step_00000010"
