"""Checks of the context-parallel group: the ranks that share one sequence."""

from __future__ import annotations

from typing import Any

import torch

from ....common.checks import described
from ...runtime.warn_once import warn_once

COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")


def check_context_parallel_group(cp_group: Any, cp_stream: Any, cp_comm_type: str) -> None:
    """Check that a context-parallel group has one rank; its size is the product over a list of groups.

    A stream without a group has no effect, which is warned about once.

    Raises:
        TypeError: A group is not a process group.
        ValueError: The kind of communication is unknown.
        NotImplementedError: The group has several ranks.
    """
    if cp_comm_type not in COMMUNICATION:
        raise ValueError(f"cp_comm_type={cp_comm_type!r}; choose one of {', '.join(COMMUNICATION)}")
    if cp_group is None:
        if cp_stream is not None:
            warn_once(
                "cp_stream",
                "cp_stream has no effect without cp_group: the sequence is not shared between ranks. Leave it None",
            )
        return
    groups = cp_group if isinstance(cp_group, (list, tuple)) else [cp_group]
    size = 1
    for group in groups:
        try:
            size *= torch.distributed.get_world_size(group)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"cp_group={described(group)} is not a process group; give a torch.distributed.ProcessGroup, a list of "
                "two for cp_comm_type='a2a+p2p', or None"
            ) from error
    if size > 1:
        raise NotImplementedError(
            f"context parallelism over {size} ranks is not available; use a group of one rank"
        )
