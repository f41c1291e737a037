"""Ranks as threads in one process, on torch's threaded process group."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def run_on_threads(function: Callable[[int], Any], size: int) -> list[Any]:
    """Run function(rank) on `size` threads and return the results; raise the first failing rank's error.

    A rank that raises ends the others, which wait for it in a collective.
    """
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=size, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                errors.append((rank, error))
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    hook = sys.excepthook  # init_process_group wraps it in every thread
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook
    if errors:
        raise errors[0][1]
    return results
