"""`te train --devices` and `te train --distributed`: the run of each rank."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape

from .demo import sharded_checkpoint
from .demo.config import Execution, resolve, restore
from .demo.data import load_corpus
from .demo.parallel import Parallelism, Ranks
from .demo.plot import plot_losses
from .demo.trainer import Trainer
from .devices import is_torchrun_rank, join_group, launch
from .failure import reporting_failures, writing
from .invocation import program
from .options import torch_device
from .progress import describe, results_table, train_with_progress

RESTARTS = 3  # after the failure of a rank, from the last checkpoint


@dataclass(frozen=True)
class TrainRequest:
    """`te train` options for several ranks."""

    device: str
    given: dict[str, Any]
    execution: Execution
    folder: Path
    resume: bool
    overwrite: bool
    log_every: int | None
    tensorboard: bool
    tp: int
    cp: int
    fsdp: int

    def parallelism(self, devices: int) -> Parallelism:
        """Rank counts."""
        return Parallelism(devices, self.tp, self.cp, self.fsdp)


def train_on_devices(request: TrainRequest, devices: int | None, distributed: bool) -> None:
    """Train on the processes of torchrun, or start a process per device.

    Raises:
        ValueError: The options contradict each other, the model, or the number of processes.
        Failure: A rank failed again after the last of the restarts.
    """
    if distributed and not is_torchrun_rank():
        raise ValueError(
            "--distributed needs the processes of torchrun; start it with torchrun, or give --devices N"
        )
    if distributed and devices is not None:
        raise ValueError("torchrun determines the number of processes; leave --devices out")
    number = int(os.environ["WORLD_SIZE"]) if distributed else devices
    assert number is not None
    if not request.resume:
        config = resolve(request.device, request.given)
        request.parallelism(number).check(config, request.execution)
    if distributed:
        train_on_ranks(request, clears=not request.resume)
        return
    if not request.resume:
        _clear(request.folder)
    launch(train_on_ranks, number, request, False, restarts=RESTARTS)


def _clear(folder: Path) -> None:
    """Create a run's folder and remove an earlier run's files."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / sharded_checkpoint.FOLDER, ignore_errors=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)


def train_on_ranks(request: TrainRequest, clears: bool) -> None:
    """Train on this rank from the last checkpoint of the folder, or from the start without one.

    Args:
        request: Run options.
        clears: Remove the files of an earlier run first.
    """
    console = Console(highlight=False, quiet=os.environ["RANK"] != "0")
    with (
        join_group(torch_device(request.device).type) as device,
        reporting_failures(console),
        _interrupts(device) as stop,
    ):
        trainer = _prepare_trainer(
            request, Ranks(request.parallelism(dist.get_world_size()), device), clears
        )
        describe(console, trainer)
        console.print(
            f"ranks   {dist.get_world_size()}: tp {request.tp}, cp {request.cp}, fsdp {request.fsdp}"
        )
        finished = train_with_progress(
            console, trainer, stop, request.log_every, request.tensorboard and dist.get_rank() == 0
        )
        if not finished:
            console.print(
                f"stopped after step {trainer.step}; continue with the same command and --resume"
            )
            raise SystemExit(130)
        if dist.get_rank() == 0:
            path = trainer.folder / "loss.png"
            with writing(path, f"free some space there; {program()} train --resume draws it again"):
                plot_losses(path, trainer.config, trainer.history)
            console.print(results_table(trainer))
            console.print(
                f"wrote {escape(str(request.folder))}/{{loss.png,metrics.jsonl,checkpoints}}",
                soft_wrap=True,
            )


def _prepare_trainer(request: TrainRequest, ranks: Ranks, clears: bool) -> Trainer:
    """Prepare a trainer at its first step, or at the step of the last checkpoint."""
    folder = request.folder
    if clears and ranks.leads:
        _clear(folder)
    dist.barrier()
    checkpoint = sharded_checkpoint.latest(folder)
    if checkpoint is None and request.resume:
        raise ValueError(
            f"there is no checkpoint in {folder}; leave --resume out to start this run, or fix --name"
        )
    if checkpoint is None:
        return _trainer(request, resolve(request.device, request.given), ranks)
    state = ranks.load(checkpoint)
    config = restore(state["config"], request.device, request.given, str(checkpoint), state["step"])
    trainer = _trainer(request, config, ranks)
    trainer.load(state)
    return trainer


def _trainer(request: TrainRequest, config: Any, ranks: Ranks) -> Trainer:
    corpus = load_corpus(config.data, config.sequence)
    return Trainer(config, corpus, request.folder, request.execution, ranks)


@contextmanager
def _interrupts(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether any rank received Ctrl-C; all ranks call it after the same step."""
    received = torch.zeros(1, device=device)

    def receive(signum: int, frame: object) -> None:
        received.fill_(1)

    def is_stopped() -> bool:
        count = received.clone()
        dist.all_reduce(count)
        return bool(count.item())

    previous = signal.signal(signal.SIGINT, receive)
    try:
        yield is_stopped
    finally:
        signal.signal(signal.SIGINT, previous)
