"""Userbuffers under the extension's names: buffers for tensor-parallel ranks, and their collectives with products.

A buffer has all ranks' rows; rank r owns the r-th of `tp_size` equal chunks. `generic_gemm` takes a buffer as
`comm_overlap`:

| comm_type | bulk_overlap | collective |
| --- | --- | --- |
| AG | False | gathers all ranks' chunks in the buffer, which holds B, and multiplies |
| RS | False | multiplies, and sums D over the ranks into each rank's rows, `extra_output` |
| AG | True | gathers the chunks beside the product, which does not read them |
| RS | True | sums the buffer over the ranks beside the product, into `extra_output` or this rank's chunk |

The process group communicates, and bulk collectives run beside the product. On GPUs in an NCCL group, buffers are in
symmetric memory. Layers do not use these classes: after `te.initialize_ub`, layers with `ub_*` flags overlap by
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.numbers import to_bool, to_int
from transformer_engine.pytorch.constants import dist_group_type
from transformer_engine.pytorch.distributed.collectives import (
    gather_rows,
    rank,
    reduce_scatter_along_first_dim,
    world_size,
)
from transformer_engine.pytorch.distributed.symmetric_memory import allocate_together
from transformer_engine.pytorch.runtime.checks import extents, group_or_none, tensor
from transformer_engine.pytorch.runtime.device import canonical_device
from transformer_engine.pytorch.runtime.warn_once import warn_once
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import (
    QuantizedTensorStorage,
)

from .checks import member
from .enums import CommOverlapType

__all__ = [
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "bulk_overlap_ag_with_external_gemm",
]


class CommOverlapHelper:
    """The process groups of buffers.

    Args:
        world_group: All ranks; by default the default group, or this process alone without torch.distributed.
        intra_node_group: Ranks that share a buffer, if they are `tp_size`; by default `world_group`.
    """

    def __init__(
        self,
        world_group: dist_group_type | None = None,
        intra_node_group: dist_group_type | None = None,
    ) -> None:
        group_or_none("world_group", world_group)
        group_or_none("intra_node_group", intra_node_group)
        self.world_group, self.intra_node_group = world_group, intra_node_group
        self._groups: dict[int, Any] = {}

    def tensor_parallel_group(self, tp_size: int) -> Any:
        """The group with `tp_size` ranks that contains this rank; all world ranks make the first call together.

        Args:
            tp_size: Number of ranks that share a buffer.

        Raises:
            ValueError: No group has this many ranks, and the world has no multiple of it.
        """
        if tp_size not in self._groups:
            self._groups[tp_size] = self._find(tp_size)
        return self._groups[tp_size]

    def _find(self, tp_size: int) -> Any:
        if tp_size == 1:
            return None
        for group in (self.intra_node_group, self.world_group):
            if group is not None and world_size(group) == tp_size:
                return group
        ranks = world_size(self.world_group)
        if ranks == tp_size:
            return dist.group.WORLD
        if self.world_group not in (None, getattr(dist.group, "WORLD", None)) or ranks % tp_size:
            raise ValueError(
                f"tp_size={tp_size}, but the world has {ranks} ranks and the node "
                f"{'no group' if self.intra_node_group is None else world_size(self.intra_node_group)}; give "
                "intra_node_group with tp_size ranks"
            )
        group, _ = dist.new_subgroups(tp_size)
        return group


class CommOverlap:
    """A tensor-parallel buffer, whose collectives `generic_gemm` runs with products.

    NVIDIA's engine pipelines a reduce-scatter with product slices through it. Here `num_splits`, the stream, SM and
    CTA counts, the priorities and `atomic_gemm` are recorded and have no effect.

    Args:
        buffer_shape: [rows over all ranks, columns].
        buffer_dtype: Element dtype; torch.uint8 for FP8 codes.
        helper: Process groups.
        tp_size: Number of ranks that share the buffer.
        use_cublasmp: Has no effect.
        comm_type: Collective that the buffer is for.
        num_splits: Has no effect.
        num_max_streams: Has no effect.
        comm_cga_size: Has no effect.
        gemm_priority: Has no effect.
        comm_priority: Stream priority in `get_communication_stream`.
        num_comm_sm: Has no effect.
        set_sm_margin: Has no effect.
        atomic_gemm: Has no effect except on `is_atomic_gemm`.
        rs_overlap_first_gemm: Has no effect.

    Raises:
        ValueError: The shape is not [rows, columns], or the rows do not divide by `tp_size`.
    """

    _P2P = False  # NVIDIA's engine sends chunks from rank to rank

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        use_cublasmp: bool = False,
        comm_type: CommOverlapType | int = CommOverlapType.RS,
        num_splits: int = 4,
        num_max_streams: int = 3,
        comm_cga_size: int = 2,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 16,
        set_sm_margin: bool = True,
        atomic_gemm: bool = False,
        rs_overlap_first_gemm: bool = False,
    ) -> None:
        self._allocate(
            buffer_shape, buffer_dtype, helper, tp_size, comm_type, comm_priority, atomic_gemm
        )

    def _allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: Any,
        priority: int,
        atomic: Any,
    ) -> None:
        sizes = extents("buffer_shape", shape)
        if len(sizes) != 2 or sizes[0] % to_int("tp_size", tp_size, 1):
            raise ValueError(
                f"buffer_shape={list(sizes)} for tp_size={tp_size}; give [rows, columns], rows a multiple of tp_size"
            )
        if not isinstance(helper, CommOverlapHelper):
            raise TypeError(f"helper={described(helper)} is not a CommOverlapHelper; give one")
        self.comm_type, self._atomic = (
            member("comm_type", CommOverlapType, comm_type),
            to_bool("atomic_gemm", atomic),
        )
        self._size, self._priority = int(tp_size), priority
        self._streams: tuple[Any, Any] | None = None
        self.group = helper.tensor_parallel_group(self._size)
        numel, device = sizes[0] * sizes[1], canonical_device(None)
        self._buffer, self.peers = _buffer(numel * dtype.itemsize, device, self.group)
        self._buffer = self._buffer.view(dtype).view(sizes)

    def _chunk(self) -> Tensor:
        """This rank's rows in the buffer."""
        return self._buffer.chunk(self._size)[rank(self.group) if self._size > 1 else 0]

    def copy_into_buffer(self, input: Any, local_chunk: bool = False) -> None:
        """Copy values or codes into the buffer.

        Args:
            input: Tensor with the same number and size of elements; for a quantized tensor, its row-wise codes.
            local_chunk: Copy into this rank's rows instead of the whole buffer.

        Raises:
            ValueError: `input` has another number or size of elements.
        """
        target = self._chunk() if local_chunk else self._buffer
        if isinstance(input, QuantizedTensorStorage):
            source: Any = input
            input = source._data if hasattr(source, "_data") else source._rowwise_data
        tensor("input", input)
        if input.numel() != target.numel() or input.dtype.itemsize != target.dtype.itemsize:
            raise ValueError(
                f"input is {input.dtype} {list(input.shape)} for {target.dtype} {list(target.shape)} of the buffer; "
                "give as many elements of this size, or another local_chunk"
            )
        target.copy_(input.detach().contiguous().view(target.dtype).view(target.shape))

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> Tensor:
        """The buffer, or this rank's rows; the tensor shares its memory.

        Args:
            local_chunk: This rank's rows.
            shape: Result shape with the same number of elements; by default [rows, columns].
        """
        buffer = self._chunk() if local_chunk else self._buffer
        return buffer if shape is None else buffer.view(extents("shape", shape))

    def get_communication_stream(self) -> tuple[Any, Any]:
        """Two streams of the buffer's device, for sends and receives; (None, None) on a CPU."""
        if not self._buffer.is_cuda:
            return None, None
        if self._streams is None:
            device = self._buffer.device
            first, second = (torch.cuda.Stream(device, priority=self._priority) for _ in range(2))
            self._streams = first, second
        return self._streams

    def get_tp_size(self) -> int:
        """Number of ranks that share the buffer."""
        return self._size

    def is_atomic_gemm(self) -> bool:
        """Whether `atomic_gemm` was given."""
        return self._atomic

    def is_p2p_overlap(self) -> bool:
        """Whether the buffer is a CommOverlapP2P."""
        return self._P2P

    def is_fp8_ubuf(self) -> bool:
        """Whether elements have one byte."""
        return self._buffer.dtype.itemsize == 1

    def with_cublasmp(self) -> bool:
        """False: cuBLASMp never runs the product."""
        return False


class CommOverlapP2P(CommOverlap):
    """A tensor-parallel buffer; NVIDIA's engine sends its chunks in a ring.

    Args:
        use_ce: Has no effect.
        aggregate: Has no effect.

    The other arguments are as in `CommOverlap`.

    Raises:
        ValueError: The shape is not [rows, columns], or the rows do not divide by `tp_size`.
    """

    _P2P = True

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: CommOverlapType | int,
        num_max_streams: int = 3,
        comm_cga_size: int = 1,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 1,
        set_sm_margin: bool = False,
        atomic_gemm: bool = False,
        use_ce: bool = True,
        aggregate: bool = False,
        use_cublasmp: bool = False,
    ) -> None:
        self._allocate(
            buffer_shape, buffer_dtype, helper, tp_size, comm_type, comm_priority, atomic_gemm
        )


def _buffer(size: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Bytes and, in symmetric memory, all ranks' buffers."""
    if group is not None and device.type == "cuda" and "nccl" in dist.get_backend_config(group):
        try:
            return allocate_together(size, torch.uint8, device, group)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            # ranks on several hosts, or GPUs that cannot read each other's memory
            warn_once(
                "CommOverlap without symmetric memory",
                f"the buffer is not in symmetric memory: {error}",
                5,
            )
    return torch.zeros(size, dtype=torch.uint8, device=device), None


class ProductExchange:
    """The collective for one product with a buffer; see the module's table.

    Args:
        buffer: CommOverlap or CommOverlapP2P.
        comm_type: AG or RS; by default the buffer's.
        extra_output: Receives a reduce-scatter's result, or a copy of the gathered rows.
        bulk: The product does not use the buffer.

    Raises:
        TypeError: `buffer` is not one of these classes.
        ValueError: A product's reduce-scatter has no `extra_output`, or a bulk reduce-scatter's buffer has codes.
    """

    def __init__(self, buffer: Any, comm_type: Any, extra_output: Tensor | None, bulk: Any) -> None:
        if not isinstance(buffer, CommOverlap):
            raise TypeError(
                f"comm_overlap={described(buffer)} has no buffer; give a CommOverlap or CommOverlapP2P, or leave it out"
            )
        kind = (
            buffer.comm_type
            if comm_type is None
            else member("comm_type", CommOverlapType, comm_type)
        )
        self.buffer, self.gathers, self.bulk = (
            buffer,
            kind is CommOverlapType.AG,
            to_bool("bulk_overlap", bulk),
        )
        self.extra_output, self._handle, self._scattered = extra_output, None, None
        if self.gathers:
            return
        if extra_output is None and not self.bulk:
            raise ValueError(
                "comm_type=RS without extra_output; give a tensor [rows of D / tp_size, columns of D] for the sums"
            )
        if self.bulk and buffer.is_fp8_ubuf():
            raise ValueError(
                f"a bulk reduce-scatter of {buffer.get_buffer().dtype}: codes have no scale in the buffer; make the "
                "buffer of a 16-bit dtype"
            )

    def before_product(self, codes: Tensor) -> None:
        """Start a bulk collective, or gather B's rows.

        Args:
            codes: B's values or codes.

        Raises:
            ValueError: B is not in the buffer from which it is gathered.
        """
        buffer = self.buffer.get_buffer()
        if self.bulk and not self.gathers:
            self._scattered, self._handle = reduce_scatter_along_first_dim(
                buffer, self.buffer.group, async_op=True
            )
        elif self.bulk:
            self._handle = _gather(self.buffer, async_op=True)
        elif self.gathers:
            if codes.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                raise ValueError(
                    "comm_type=AG gathers B in the buffer of comm_overlap, and B has other memory; give get_buffer(), "
                    "or a quantized tensor of these codes"
                )
            _gather(self.buffer)

    def after_product(self, result: Any) -> Tensor | None:
        """Complete the collective.

        Args:
            result: D.

        Returns:
            `extra_output`.
        """
        if self._handle is not None:
            self._handle.wait()
        if self.bulk and not self.gathers:
            target = (
                self.buffer.get_buffer(True) if self.extra_output is None else self.extra_output
            )
            assert self._scattered is not None
            target.copy_(self._scattered.view(target.shape))
        elif self.gathers and self.extra_output is not None:
            is_full = self.extra_output.numel() == self.buffer.get_buffer().numel()
            rows = self.buffer.get_buffer(local_chunk=not is_full)
            self.extra_output.copy_(
                rows.view(self.extra_output.dtype).view(self.extra_output.shape)
            )
        elif not self.gathers:
            assert self.extra_output is not None
            values = result.dequantize() if isinstance(result, QuantizedTensorStorage) else result
            rows = values.to(self.extra_output.dtype).reshape(-1, values.shape[-1])
            summed, _ = reduce_scatter_along_first_dim(rows, self.buffer.group)
            self.extra_output.copy_(summed.view(self.extra_output.shape))
        return self.extra_output


def _gather(buffer: CommOverlap, async_op: bool = False) -> Any:
    """Gather all ranks' chunks in the buffer; returns the handle, or None."""
    if buffer.get_tp_size() == 1:
        return None
    chunk = buffer.get_buffer(True)
    own = chunk if chunk.is_cuda else chunk.clone()  # gloo requires separate memory
    return gather_rows(own, buffer.group, async_op, None, buffer.get_buffer())[1]


def bulk_overlap_ag_with_external_gemm(ub: CommOverlap, send_stream: Any, recv_stream: Any) -> None:
    """Gather all ranks' chunks in a buffer on a stream, beside products on other streams.

    Args:
        ub: The buffer.
        send_stream: Has no effect: one stream gathers.
        recv_stream: Gather stream, which waits for the current stream; None on a CPU. The caller waits for it.
    """
    if not isinstance(ub, CommOverlap):
        raise TypeError(f"ub={described(ub)} has no buffer; give a CommOverlap or CommOverlapP2P")
    if recv_stream is None or not ub.get_buffer().is_cuda:
        _gather(ub)
        return
    recv_stream.wait_stream(torch.cuda.current_stream(ub.get_buffer().device))
    with torch.cuda.stream(recv_stream):
        _gather(ub)
