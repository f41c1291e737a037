"""All-reduce over symmetric memory: every rank reads the buffers of the others, in rank order.

One shot: every rank sums the values of all ranks. Two shots: every rank sums its share of the values, and then
reads the other shares. Sums are float32 and have the same order on all ranks, which therefore get the same bits.

Buffers come from `torch.distributed._symmetric_memory`. NVLink multicast is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.checks import check_option, switch
from ...common.dispatch import Backend, Table
from ..constants import dist_group_type
from ..runtime.checks import extents, group_or_none, tensor, values_dtype
from ..runtime.device import canonical_device
from ..runtime.warn_once import warn_once
from .collectives import allreduce, world_size
from .faults import NamedWork

SYMMETRIC, PROCESS_GROUP = "symmetric_memory", "process_group"
# "multimem_all_reduce" names an algorithm over multicast; "two_shot" has the same result without it.
_ALGORITHMS = {"one_shot": "one_shot", "two_shot": "two_shot", "multimem_all_reduce": "two_shot"}
SYMMETRIC_ALL_REDUCES = (None, "nccl", *_ALGORITHMS)


# The buffers of all ranks: a `torch._C._distributed_c10d._SymmetricMemory`.
Peers = Any


class _SharedBuffer(NamedTuple):
    """This rank's buffer, its peers, and their group.

    Attributes:
        values: Buffer of this rank.
        peers: Buffers of the other ranks.
        group: Process group.
    """

    values: Tensor
    peers: Peers
    group: Any


class Reduction(NamedTuple):
    """A request for an all-reduce.

    Attributes:
        algorithm: "one_shot" or "two_shot"; None for the process group's own.
        device: Device type.
        dtype: Value dtype.
        backends: Backends of the process group, as `get_backend_config` returns them.
        compiling: A compiler is tracing.
    """

    algorithm: str | None
    device: str
    dtype: torch.dtype
    backends: str
    compiling: bool


def unsupported_reason(request: Reduction) -> str | None:
    """Return why an all-reduce cannot run over symmetric memory, or None."""
    if request.algorithm is None:
        return "the process group's own all-reduce was requested"
    if request.device != "cuda":
        return f"symmetric memory exists on GPUs, the values are on {request.device}"
    if "nccl" not in request.backends:
        return f"symmetric memory requires an NCCL group, this group has {request.backends}"
    if not request.dtype.is_floating_point:
        return f"sums are float32, the values are {request.dtype}"
    return "a compiler is tracing, which sees no peer's memory" if request.compiling else None


ALL_REDUCE: Table[Reduction] = Table(
    "all_reduce",
    (Backend(SYMMETRIC, unsupported_reason=unsupported_reason), Backend(PROCESS_GROUP)),
    describe=Reduction,
)

_buffers: dict[tuple[Any, ...], _SharedBuffer] = {}


def allocate_together(
    numel: int, dtype: torch.dtype, device: torch.device, group: Any
) -> tuple[Tensor, Peers]:
    """Return a buffer that all ranks in the group allocate at the same time, and its peers."""
    from torch.distributed import _symmetric_memory as symmetric  # importing it registers operators

    values = symmetric.empty(numel, dtype=dtype, device=device)
    return values, symmetric.rendezvous(values, group)


def _buffer(
    numel: int, dtype: torch.dtype, device: torch.device, group: Any, tag: Any
) -> _SharedBuffer:
    key = (numel, dtype, device, group.group_name, tag)
    cached = _buffers.get(key)
    if cached is None or cached.group is not group:
        cached = _buffers[key] = _SharedBuffer(
            *allocate_together(numel, dtype, device, group), group
        )
    return cached


def get_symmetric_memory_tensor(
    tensor_numel: int,
    tensor_dtype: torch.dtype,
    tensor_device: torch.device,
    tp_group: dist_group_type,
    tag: Any = None,
) -> Tensor:
    """Return a vector in symmetric memory, allocated at the first call with these arguments on all ranks.

    Args:
        tensor_numel: Element count.
        tensor_dtype: Dtype.
        tensor_device: The GPU.
        tp_group: Process group whose ranks can read the vector.
        tag: Distinguishes vectors that are used at the same time.

    Raises:
        ValueError: The device is not a GPU.
    """
    if torch.device(tensor_device).type != "cuda":
        raise ValueError(
            f"tensor_device={str(tensor_device)!r}: symmetric memory exists on GPUs; give a CUDA device, or call "
            "symmetric_all_reduce, which uses the process group on a CPU"
        )
    return _buffer(tensor_numel, tensor_dtype, tensor_device, tp_group, tag).values


def symmetric_all_reduce(
    inp: Tensor,
    tp_group: dist_group_type | None = None,
    async_op: bool = False,
    all_reduce_type: str | None = "multimem_all_reduce",
) -> tuple[Tensor, dist.Work | NamedWork | None]:
    """Return the sum over the ranks, written to inp, over symmetric memory where that is available.

    Args:
        inp: Values on every rank.
        tp_group: The process group, by default the world group.
        async_op: Return a handle; the process group's own all-reduce computes the sum.
        all_reduce_type: "one_shot" for small messages, "two_shot" for others, "multimem_all_reduce" as "two_shot", or
            "nccl" or None for the process group's own all-reduce.

    Raises:
        ValueError: The type is unknown.
    """
    check_option("all_reduce_type", all_reduce_type, SYMMETRIC_ALL_REDUCES)
    if world_size(tp_group) == 1 or async_op:
        return allreduce(inp, tp_group, async_op)
    group: Any = dist.group.WORLD if tp_group is None else tp_group
    algorithm = _ALGORITHMS.get(all_reduce_type or "")
    key = (
        algorithm,
        inp.device.type,
        inp.dtype,
        dist.get_backend_config(group),
        torch.compiler.is_compiling(),
    )
    if ALL_REDUCE.choose(key) == SYMMETRIC:
        # The process has one buffer for all sizes up to a power of two.
        buffer = _buffer(
            1 << (inp.numel() - 1).bit_length(), inp.dtype, inp.device, group, "all_reduce"
        )
        values = inp.contiguous()
        reduce_values(buffer.peers, buffer.values, values.view(-1), algorithm == "two_shot")
        return (inp if values is inp else inp.copy_(values)), None
    if algorithm is not None:
        reason = unsupported_reason(Reduction(*key))
        warn_once(
            f"symmetric all-reduce: {reason}",
            f"symmetric_ar_type={all_reduce_type!r} has no effect: {reason}. The process group's own all-reduce "
            "has the same result; leave the argument None",
        )
    return allreduce(inp, tp_group)


def reduce_values(peers: Peers, buffer: Tensor, values: Tensor, two_shots: bool) -> None:
    """Replace values [n] by their sum over the ranks.

    Args:
        peers: The buffers of all ranks.
        buffer: This rank's buffer, with at least n elements.
        values: The values, contiguous.
        two_shots: Each rank sums a share; otherwise each rank sums all.
    """
    count, dtype = values.numel(), values.dtype
    buffer[:count].copy_(values)
    peers.barrier()
    if not two_shots:
        values.copy_(_sum_parts(peers, dtype, 0, count))
        peers.barrier()  # no rank writes the next values before all have read these
        return
    share = -(-count // peers.world_size)
    bounds = [
        (min(rank * share, count), min((rank + 1) * share, count))
        for rank in range(peers.world_size)
    ]
    start, stop = bounds[peers.rank]
    if stop > start:
        buffer[start:stop].copy_(_sum_parts(peers, dtype, start, stop - start))
    peers.barrier()
    for step in range(peers.world_size):
        rank = (
            peers.rank + step
        ) % peers.world_size  # at every step the ranks read from different peers
        start, stop = bounds[rank]
        if stop > start:
            values[start:stop].copy_(peers.get_buffer(rank, (stop - start,), dtype, start))
    peers.barrier()


def _sum_parts(peers: Peers, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Return the float32 sum over all buffers for a part; every rank adds in the same order."""
    total = peers.get_buffer(0, (count,), dtype, start).to(torch.float32, copy=True)
    for rank in range(1, peers.world_size):
        total += peers.get_buffer(rank, (count,), dtype, start)
    return total


# symm_mem_alloc storages by address.
_symmetric: dict[int, StorageWeakRef] = {}


def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: dist_group_type | None,
    device: torch.device | str | None = None,
    use_pool: bool = False,
    backend: str = "NCCL",
) -> Tensor:
    """Allocate a buffer for `ep_dispatch` or `ep_combine`.

    The buffer is ordinary memory, because torch.distributed sends from and receives into any memory.

    Args:
        shape: Buffer shape.
        dtype: Buffer dtype.
        ep_group: Has no effect.
        device: Device; None for the current GPU, or the CPU without a GPU.
        use_pool: Has no effect; torch's caching allocator reuses memory.
        backend: Has no effect.

    Returns:
        Uninitialized tensor for which `is_symm_backed` is True.
    """
    group_or_none("ep_group", ep_group)
    switch("use_pool", use_pool)
    values_dtype("dtype", dtype)
    buffer = torch.empty(
        extents("shape", shape), dtype=dtype, device=canonical_device(device, "device")
    )
    for address in [address for address, storage in _symmetric.items() if storage.expired()]:
        del _symmetric[address]
    _symmetric[buffer.untyped_storage().data_ptr()] = StorageWeakRef(buffer.untyped_storage())
    return buffer


def is_symm_backed(t: Tensor) -> bool:
    """Return whether a tensor is a `symm_mem_alloc` buffer, or a view of one.

    Args:
        t: Any tensor.
    """
    tensor("t", t)
    reference = _symmetric.get(t.untyped_storage().data_ptr())
    return reference is not None and not reference.expired()


def release_symm_mem_pool() -> None:
    """Do nothing: `symm_mem_alloc` memory is freed with its tensors."""
