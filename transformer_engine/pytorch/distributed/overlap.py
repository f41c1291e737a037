"""Which collectives overlap with their own products, by size and by what the ranks of a group can read.

`initialize_ub` sets the size of the buffers (`overlapped_rows.py`). At the first collective whose layer has a `ub_*`
flag, a group allocates them and measures from which size on they are faster than the process group
(`overlap_measurement.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.dispatch import Backend, Table
from ..runtime.capture import is_graph_capturing
from ..runtime.warn_once import warn_once
from .overlap_measurement import Least, least_sizes
from .overlapped_rows import Copies
from .symmetric_memory import PROCESS_GROUP, SYMMETRIC, allocated

GATHER, SCATTER = "all_gather", "reduce_scatter"


class Request(NamedTuple):
    """A collective that could overlap with its product.

    Attributes:
        operation: "all_gather" or "reduce_scatter".
        device: Type of the device.
        backends: Backends of the process group, as `get_backend_config` returns them.
        size: Bytes that this rank writes to its buffer.
        capacity: Bytes of a buffer; 0 without `initialize_ub`.
        least: Bytes from which on the overlap is faster than the process group; None if never.
        problem: Why the ranks of the group have no buffers, or "".
    """

    operation: str
    device: str
    backends: str
    size: int
    capacity: int
    least: int | None
    problem: str


def unsupported_reason(request: Request) -> str | None:
    """Return why a collective does not overlap with its product, or None."""
    if reason := _lasting_reason(request):
        return reason
    if request.size > request.capacity:
        return (
            f"a rank sends {request.size:,} bytes and initialize_ub reserved {request.capacity:,}; "
            "give it the shape of the whole activations"
        )
    if request.least is None or request.size < request.least:
        least = "any size" if request.least is None else f"less than {request.least:,} bytes"
        return f"a rank sends {request.size:,} bytes, and the process group is faster on this machine for {least}"
    return None


def _lasting_reason(request: Request) -> str | None:
    """Return the reason that holds for all sizes."""
    if request.device != "cuda":
        return f"copy engines belong to GPUs, the values are on {request.device}"
    if "nccl" not in request.backends:
        return f"symmetric memory requires an NCCL group, this group has {request.backends}"
    if not request.capacity:
        return "initialize_ub, which reserves the buffers, has not been called"
    return request.problem or None


OVERLAP: Table[Request] = Table(
    "overlap",
    (Backend(SYMMETRIC, unsupported_reason=unsupported_reason), Backend(PROCESS_GROUP)),
    describe=Request,
)


class Ready(NamedTuple):
    """The buffers of a group, and from which size on they are used."""

    copies: Copies
    least: Least


class _Reserved:
    """The bytes that `initialize_ub` reserved, and what the groups that used them have.

    Attributes:
        size: Bytes of a buffer.
        groups: Buffers of each group, or the reason why it has none.
    """

    def __init__(self) -> None:
        self.size = 0
        self.groups: WeakKeyDictionary[Any, Ready | str] = WeakKeyDictionary()


_reserved = _Reserved()


def reserve(size: int) -> None:
    """Let groups allocate two buffers of this many bytes on each rank.

    Args:
        size: Bytes of a buffer; 0 frees the buffers of all groups.
    """
    _reserved.size = size
    _reserved.groups.clear()


def copies_for(operation: str, values: Tensor, size: int, group: Any) -> Copies | None:
    """Return the copies that a collective uses to overlap with its product, or None for the process group.

    All ranks of the group call it with equal arguments.

    Args:
        operation: "all_gather" or "reduce_scatter".
        values: A tensor on the device of the collective.
        size: Bytes that this rank writes to its buffer.
        group: Process group.
    """
    group = dist.group.WORLD if group is None else group
    key = [operation, values.device.type, dist.get_backend_config(group), size, _reserved.size, 0, ""]
    made: Ready | str | None = None
    if _lasting_reason(Request(*key)) is None:
        made = _ready(group, values.device)
        if isinstance(made, str):
            key[-1] = made
        elif made is None:
            key[-1] = "the first use of the group is in a CUDA graph; run the layer once before its capture"
        else:
            key[-2] = made.least.gather if operation == GATHER else made.least.scatter
    if OVERLAP.choose(tuple(key)) == SYMMETRIC:
        assert isinstance(made, Ready)
        return made.copies
    request = Request(*key)
    reason = _lasting_reason(request)
    if reason is None and size > request.capacity:
        reason = unsupported_reason(request)
    if reason is not None:
        warn_once(
            f"overlap: {reason}",
            f"ub_* flags have no effect on {operation}: {reason}. The process group's collective has the same result",
        )
    return None


def _ready(group: Any, device: torch.device) -> Ready | str | None:
    """Return the buffers of a group, or why it has none; None while a graph is captured, which cannot allocate them."""
    known = _reserved.groups.get(group)
    if known is not None:
        return known
    if is_graph_capturing() or torch.cuda.is_current_stream_capturing():
        return None
    problem, copies = "", None
    try:
        # Each pair is a buffer of this rank and its peers.
        buffers = [allocated(_reserved.size, torch.uint8, device, group) for _ in range(2)]
        copies = Copies(buffers, torch.cuda.Stream(device, priority=-1))
    except RuntimeError as error:  # ranks of several hosts, or GPUs that cannot read each other's memory
        problem = f"symmetric memory is not available, {error}"
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    problem = next(filter(None, problems), "")
    if copies is None or problem:
        _reserved.groups[group] = problem
        return problem
    made = Ready(copies, least_sizes(copies, group, device))
    _reserved.groups[group] = made
    return made
