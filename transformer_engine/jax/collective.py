"""Collectives around a matrix product: the one in the forward pass determines the one in the backward pass."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..common.checks import integer, member, whole

__all__ = ["CollectiveOp", "CollectiveOpSet", "collective_gemm_bootstrap", "noop_collective_op_set"]


class CollectiveOp(enum.Enum):
    """The collective on an operand before a product, or on its result."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2

    @property
    def is_none(self) -> bool:
        return self is CollectiveOp.NONE

    @property
    def backward(self) -> CollectiveOp:
        """The collective of the gradient, which is the inverse one."""
        opposites = {self.ALL_GATHER: self.REDUCE_SCATTER, self.REDUCE_SCATTER: self.ALL_GATHER}
        return opposites.get(self, self.NONE)


@dataclass(frozen=True)
class CollectiveOpSet:
    """One layer's collectives; XLA inserts them where the input and output shardings require.

    Args:
        forward: Collective in the forward pass.
        backward: Collective in the backward pass.
    """

    forward: CollectiveOp
    backward: CollectiveOp

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> CollectiveOpSet:
        member("forward_collective_op", forward_collective_op, CollectiveOp)
        return CollectiveOpSet(forward_collective_op, forward_collective_op.backward)


noop_collective_op_set = CollectiveOpSet(CollectiveOp.NONE, CollectiveOp.NONE)


def collective_gemm_bootstrap(
    num_total_devices: int,
    num_devices_per_process: int,
    process_id: int,
    tensor_parallel_size: int,
    num_max_streams: int = 3,
    compute_stream_priority: int = 0,
    communication_stream_priority: int = 0,
    num_sm_for_communication: int = 2,
    use_ce: bool = True,
    aggregate_all_gather: bool = False,
    use_cublasmp: bool = False,
) -> None:
    """Check that the sizes fit together; nothing is prepared, because XLA schedules the collectives.

    Args:
        num_total_devices: Number of devices over all processes.
        num_devices_per_process: Devices per process.
        process_id: Index of this process.
        tensor_parallel_size: Number of tensor-parallel devices.
        num_max_streams: Checked; has no other effect.
        compute_stream_priority: Has no effect.
        communication_stream_priority: Has no effect.
        num_sm_for_communication: Has no effect.
        use_ce: Has no effect.
        aggregate_all_gather: Has no effect.
        use_cublasmp: Has no effect.
    """
    for name, value in (
        ("num_total_devices", num_total_devices),
        ("num_devices_per_process", num_devices_per_process),
        ("tensor_parallel_size", tensor_parallel_size),
        ("num_max_streams", num_max_streams),
    ):
        whole(name, value)
    for name, divisor in (
        ("num_devices_per_process", num_devices_per_process),
        ("tensor_parallel_size", tensor_parallel_size),
    ):
        if num_total_devices % divisor:
            raise ValueError(
                f"{name}={divisor} does not divide num_total_devices={num_total_devices}; pass a divisor"
            )
    integer("process_id", process_id)
    processes = num_total_devices // num_devices_per_process
    if not 0 <= process_id < processes:
        raise ValueError(
            f"process_id={process_id}; there are {processes} processes, give one from 0 on"
        )
