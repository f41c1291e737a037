"""cp_size = product of the sizes of the groups that share a sequence."""

from __future__ import annotations

from typing import Any

import torch

COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")


def check_context_parallel_group(cp_group: Any, cp_comm_type: str) -> None:
    """NotImplementedError for a group of several ranks, ValueError for an unknown communication."""
    if cp_comm_type not in COMMUNICATION:
        raise ValueError(f"cp_comm_type={cp_comm_type!r}; choose one of {', '.join(COMMUNICATION)}")
    if cp_group is None:
        return
    groups = cp_group if isinstance(cp_group, list) else [cp_group]
    size = 1
    for group in groups:
        size *= torch.distributed.get_world_size(group)
    if size > 1:
        raise NotImplementedError(
            f"context parallelism over {size} ranks is not available; use a group of one rank"
        )
