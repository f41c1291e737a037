"""Ranks that delay a collective are logged by the ranks that wait for them."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.support.forked import CONTEXT
from transformer_engine.common import recipe
from transformer_engine.pytorch.distributed import progress
from transformer_engine.pytorch.distributed.progress import Report, delaying_ranks

HIDDEN, TOKENS = 256, 256
WAIT = 90.0  # seconds in which a test's ranks must be done


def test_a_rank_with_fewer_collectives_delays_the_others():
    reports = {1: Report(9, {"a": 4, "b": 7}, 100.0), 2: Report(8, {"a": 5}, 101.0)}
    assert delaying_ranks("a", 5, reports, 102.0) == "rank 1 has queued 4 and does not take part"
    assert delaying_ranks("b", 8, reports, 102.0) == "rank 1 has queued 7 and does not take part"
    assert delaying_ranks("a", 4, reports, 102.0) == ""
    assert delaying_ranks("c", 4, reports, 102.0) == ""


def test_a_rank_without_reports_has_ended():
    reports = {1: Report(9, {"a": 5}, 100.0), 2: Report(8, {"a": 5}, 120.0)}
    assert delaying_ranks("a", 5, reports, 121.0) == (
        "rank 1 has ended or does not respond, it has not reported for 21 s"
    )


def join(rank: int, ranks: int, folder: str, seconds: int) -> torch.device:
    """Join a group of NCCL if there are enough GPUs, otherwise of gloo; log to a file of this rank."""
    progress.PERIOD, progress.PATIENCE = 0.5, 5.0
    progress.LOGGER.addHandler(logging.FileHandler(Path(folder, f"{rank}.log")))
    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    if not on_gpus:
        progress.MONITOR.add(dist.group.WORLD)
    return device


def row_layer(device: torch.device, **options: Any) -> te.Linear:
    size = dist.get_world_size()
    return te.Linear(
        HIDDEN,
        HIDDEN,
        parallel_mode="row",
        tp_group=dist.group.WORLD,
        tp_size=size,
        device=device,
        **options,
    )


def delayed(rank: int, ranks: int, folder: str, fault: str) -> None:
    """Train a row-parallel layer; the last rank waits, or ends, until the others have logged it."""
    device = join(rank, ranks, folder, seconds=60)
    layer = row_layer(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(TOKENS, HIDDEN // ranks, device=device)
    for step in range(4):
        if step == 3 and rank == ranks - 1:
            if fault == "ends":
                Path(folder, f"{rank}.done").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while not all(
                Path(folder, f"{other}.log").stat().st_size for other in range(ranks - 1)
            ):
                time.sleep(0.1)
        layer(x).sum().backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    Path(folder, f"{rank}.done").touch()
    dist.destroy_process_group()


def differs(rank: int, ranks: int, folder: str, _: str) -> None:
    """Call layers whose settings differ on the last rank."""
    device = join(rank, ranks, folder, seconds=60)
    last = rank == ranks - 1
    changes: list[Callable[[], object]] = [
        lambda: row_layer(device, sequence_parallel=last)(
            torch.randn(TOKENS, HIDDEN // ranks, device=device)
        ),
        lambda: row_layer(device)(torch.randn(TOKENS * (1 + last), HIDDEN // ranks, device=device)),
        functools.partial(_quantized, device, ranks, last),
    ]
    messages = []
    for change in changes:
        try:
            change()
        except RuntimeError as error:
            messages.append(str(error))
    Path(folder, f"{rank}.log").write_text("\n".join(messages))
    Path(folder, f"{rank}.done").touch()
    dist.barrier()
    dist.destroy_process_group()


def _quantized(device: torch.device, ranks: int, last: bool) -> None:
    with te.autocast(enabled=last, recipe=recipe.Float8CurrentScaling()):
        row_layer(device)(torch.randn(TOKENS, HIDDEN // ranks, device=device))


def run_until(
    function: Callable[..., None], ranks: int, folder: Path, fault: str, done: Callable[[], bool]
) -> None:
    """Run function(rank, ..) in processes until done() or all have ended, then kill the others."""
    processes = [
        CONTEXT.Process(target=function, args=(rank, ranks, str(folder), fault))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + WAIT
    while (
        time.monotonic() < end and not done() and any(process.is_alive() for process in processes)
    ):
        time.sleep(0.1)
    for process in processes:
        if done():
            process.join(0 if fault == "ends" else 30)
        if process.is_alive():
            process.kill()
        process.join()


def logs(folder: Path, ranks: int) -> list[str]:
    return [
        path.read_text() if (path := folder / f"{rank}.log").exists() else ""
        for rank in range(ranks)
    ]


def check_slow_rank(folder: Path, ranks: int) -> None:
    done = [folder / f"{rank}.done" for rank in range(ranks)]
    run_until(delayed, ranks, folder, "waits", lambda: all(path.exists() for path in done))
    assert all(path.exists() for path in done)
    members = list(range(ranks))
    for rank, text in enumerate(logs(folder, ranks)[:-1]):
        assert f"rank {rank} has queued" in text and f"over ranks {members}" in text, text
        assert f"rank {ranks - 1} has queued" in text and "does not take part" in text, text


def test_a_slow_rank_is_logged_and_training_continues(tmp_path: Path):
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    check_slow_rank(tmp_path, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_ends_under_nccl_is_logged_before_the_timeout(tmp_path: Path):
    ranks = 4 if torch.cuda.device_count() >= 4 else 2

    def named() -> bool:
        return all(f"rank {ranks - 1} has ended" in text for text in logs(tmp_path, ranks)[:-1])

    run_until(delayed, ranks, tmp_path, "ends", named)
    assert named(), logs(tmp_path, ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_differences_under_nccl_are_raised_on_every_rank(tmp_path: Path):
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    done = [tmp_path / f"{rank}.done" for rank in range(ranks)]
    run_until(differs, ranks, tmp_path, "settings", lambda: all(path.exists() for path in done))
    for text in logs(tmp_path, ranks):
        assert text.count("the ranks of a process group differ") == 3, text
        assert "sequence_parallel: rank" in text and f"[{2 * TOKENS}, {HIDDEN}]" in text, text
        assert "recipe: rank" in text and "Current" in text, text
