"""Real processes for distributed tests: NCCL where there are enough GPUs, else gloo on the CPU."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.support.forked import CONTEXT

TIMEOUT = timedelta(minutes=5)  # for a collective that some rank does not join


def run_on_ranks(function: Callable[[torch.device], Any], size: int, directory: Path) -> list[Any]:
    """Run function(device) on `size` CPU ranks and return the results; raise with all ranks' errors."""
    try:
        multiprocessing.start_processes(
            _rank,
            (function, size, str(directory)),
            nprocs=size,
            start_method=CONTEXT.get_start_method(),
        )
    except (
        multiprocessing.ProcessRaisedException,
        multiprocessing.ProcessExitedException,
    ) as error:
        # torch raises the first rank's error, often only that another rank disconnected.
        report = [
            f"rank {path.stem}:\n{path.read_text()}" for path in sorted(directory.glob("*.error"))
        ]
        raise RuntimeError("\n".join(report)) from error
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _rank(rank: int, function: Callable[[torch.device], Any], size: int, directory: str) -> None:
    gc.freeze()  # garbage collections do not visit the server's objects
    torch.set_num_threads(1)
    cuda = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{directory}/rendezvous",
        timeout=TIMEOUT,
        rank=rank,
        world_size=size,
    )
    torch.manual_seed(100 + rank)
    try:
        result = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(device))
        torch.save(result, f"{directory}/{rank}.pt")
        dist.barrier()
    except Exception:
        Path(directory, f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
