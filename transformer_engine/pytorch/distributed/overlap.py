"""Choose whether a collective overlaps with its product, from its message size and from peer access.

`initialize_ub` sets the buffer size (`overlapped_rows.py`). At the first collective whose layer has
a `ub_*` flag, a process group allocates them and measures the least message size for which they are
faster than its own collectives (`overlap_measurement.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...common.dispatch import Backend, Table
from ..runtime.capture import is_graph_capturing
from ..runtime.warn_once import warn_once
from .faults import common_settings
from .overlap_measurement import Thresholds, load_thresholds
from .overlapped_rows import PeerBuffers
from .symmetric_memory import PROCESS_GROUP, SYMMETRIC, allocate_together

GATHER, SCATTER = "all_gather", "reduce_scatter"


class OverlapRequest(NamedTuple):
    """A collective that could overlap with its product.

    Attributes:
        operation: "all_gather" or "reduce_scatter".
        device: Device type.
        backends: Backends of the process group, as `get_backend_config` returns them.
        size: Message bytes in a buffer.
        capacity: Buffer bytes; 0 without `initialize_ub`.
        least: Least message size that is faster with overlap; None if no size is.
        problem: Why the ranks of the group have no buffers, or "".
    """

    operation: str
    device: str
    backends: str
    size: int
    capacity: int
    least: int | None
    problem: str


def unsupported_reason(request: OverlapRequest) -> str | None:
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


def _lasting_reason(request: OverlapRequest) -> str | None:
    """Return the reason that holds for all sizes."""
    if request.device != "cuda":
        return f"symmetric memory exists on GPUs, the values are on {request.device}"
    if "nccl" not in request.backends:
        return f"symmetric memory requires an NCCL group, this group has {request.backends}"
    if not request.capacity:
        return "initialize_ub, which reserves the buffers, has not been called"
    return request.problem or None


OVERLAP: Table[OverlapRequest] = Table(
    "overlap",
    (Backend(SYMMETRIC, unsupported_reason=unsupported_reason), Backend(PROCESS_GROUP)),
    describe=OverlapRequest,
)


class GroupBuffers(NamedTuple):
    """Buffers of a process group, its backends, and the least sizes for which the buffers are used.

    Attributes:
        buffers: Symmetric-memory buffers of the group.
        backends: Backends of the process group.
        least: Smallest message sizes for which the buffers are used.
    """

    buffers: PeerBuffers
    backends: str
    least: Thresholds


class _Reserved:
    """The bytes that `initialize_ub` reserved, and the buffers that process groups have allocated.

    Attributes:
        size: Buffer bytes.
        groups: Buffers of each group, or the reason why it has none.
    """

    def __init__(self) -> None:
        self.size = 0
        self.groups: WeakKeyDictionary[Any, GroupBuffers | str] = WeakKeyDictionary()


_reserved = _Reserved()


def reserve(size: int) -> None:
    """Let groups allocate two buffers of this many bytes on each rank.

    Args:
        size: Buffer bytes; 0 frees the buffers of all groups.
    """
    _reserved.size = common_settings["bytes of initialize_ub"] = size
    _reserved.groups.clear()


def peer_buffers(operation: str, device: torch.device, size: int, group: Any) -> PeerBuffers | None:
    """Return the buffers through which a collective overlaps with its product, or None for the process group.

    All ranks in the group call it with equal arguments.

    Args:
        operation: "all_gather" or "reduce_scatter".
        device: Collective device.
        size: Message bytes in a buffer.
        group: Process group.
    """
    cached = _reserved.groups.get(group)
    if not isinstance(cached, GroupBuffers):
        cached = _first_buffers(operation, device, size, group)
    if isinstance(cached, GroupBuffers):
        least = cached.least.gather if operation == GATHER else cached.least.scatter
        request = OverlapRequest(
            operation, device.type, cached.backends, size, _reserved.size, least, ""
        )
        if OVERLAP.choose(request) == SYMMETRIC:
            return cached.buffers
    else:
        request = cached
        OVERLAP.choose(request)
    # Messages below the threshold are not worth a warning.
    lasting = _lasting_reason(request)
    if lasting is not None or request.least is None or size > request.capacity:
        warn_once(
            f"overlap of {operation}: {lasting or request.least}",
            f"ub_* flags have no effect on {operation}: {unsupported_reason(request)}. The process group communicates "
            "instead",
        )
    return None


def _first_buffers(
    operation: str, device: torch.device, size: int, group: Any
) -> GroupBuffers | OverlapRequest:
    """Return buffers for a group that has none yet, or a request with the reason why it cannot have them."""
    backends = dist.get_backend_config(group)
    request = OverlapRequest(operation, device.type, backends, size, _reserved.size, 0, "")
    if _lasting_reason(request) is not None:
        return request
    cached = _group_buffers(group, device)
    if isinstance(cached, GroupBuffers):
        return cached
    in_graph = (
        "the first use of the group is in a CUDA graph; run the layer once before its capture"
    )
    return request._replace(problem=cached or in_graph)


def _group_buffers(group: Any, device: torch.device) -> GroupBuffers | str | None:
    """Return the buffers of a group, or why it has none; None while a graph is captured, which cannot allocate them."""
    cached = _reserved.groups.get(group)
    if cached is not None:
        return cached
    if is_graph_capturing() or torch.cuda.is_current_stream_capturing():
        return None
    problem, buffers = "", None
    try:
        # Each pair is a buffer of this rank and its peers. Other modes cannot write to tensors of inference mode.
        with torch.inference_mode(False):
            pairs = [
                allocate_together(_reserved.size, torch.uint8, device, group) for _ in range(2)
            ]
        buffers = PeerBuffers(pairs, torch.cuda.Stream(device, priority=-1))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        # ranks on several hosts, or GPUs that cannot read each other's memory
        problem = f"symmetric memory is not available, {error}"
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    problem = next(filter(None, problems), "")
    created = (
        problem
        if buffers is None or problem
        else GroupBuffers(
            buffers, dist.get_backend_config(group), load_thresholds(buffers, group, device)
        )
    )
    _reserved.groups[group] = created
    return created
