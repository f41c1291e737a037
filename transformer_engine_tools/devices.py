"""Processes of a command on several devices: one rank per device, NCCL on GPUs and gloo on a CPU.

Under torchrun the processes exist; otherwise a command starts them itself through torch's elastic launcher.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .failure import Failure

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CPU_DEVICES = 2  # default number of processes on a CPU
TIMEOUT = timedelta(minutes=5)  # per collective


def is_torchrun_rank() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return all(name in os.environ for name in VARIABLES)


def default_devices() -> int:
    """Number of GPUs on this machine, or 2 on a CPU."""
    return torch.cuda.device_count() or CPU_DEVICES


def launch(function: Callable[..., None], devices: int, *arguments: Any, restarts: int = 0) -> None:
    """Run function(*arguments) in one new process per device on this machine and wait for all processes.

    Args:
        function: Module-level function; the processes import it.
        devices: Number of processes.
        *arguments: Arguments that can be pickled.
        restarts: How often all processes are started again after one has failed.

    Raises:
        Failure: A process failed. The others are stopped.
        SystemExit: A signal ended this process.
    """
    # Importing the launcher takes half a second, which commands on one device do not need.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
    )
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        message = (
            first.message if isinstance(first.message, str) else first.message.get("message", "")
        )
        raise Failure(f"rank {rank} failed with exit code {first.exitcode}: {message}") from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval.value) from None


def _store_of_attempt() -> tuple[dist.Store, int, int]:
    """Get the launcher's store without the keys of earlier attempts, the rank and the number of ranks.

    The launcher keeps one store while it restarts its processes. There, a rank would find the address of a process that
    has ended. The machines of a run count their restarts separately, so a run on several machines has no prefix.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"transformer_engine/attempt_{attempt}", store)
    return store, rank, size


@contextmanager
def join_group(device: str) -> Iterator[torch.device]:
    """Join the process group of the launcher and return this rank's device; the group ends with the context.

    Args:
        device: "cuda" or "cpu".

    Raises:
        ValueError: The machine has fewer GPUs than ranks.
    """
    # torch 2.13 renames collectives, torch 2.11 has the earlier names only.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"rank {local} of this machine has no GPU, there are {torch.cuda.device_count()}; start fewer "
                "processes, or use --device cpu"
            )
        placed = torch.device("cuda", local)
        torch.cuda.set_device(placed)
    else:
        placed = torch.device("cpu")
        # The processes share the cores. More threads than cores wait for each other.
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
    store, rank, size = _store_of_attempt()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield placed
    finally:
        dist.destroy_process_group()
