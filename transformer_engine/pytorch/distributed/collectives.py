"""Collectives along the first dimension: all-gather, reduce-scatter, all-reduce; all return (result, handle).

The handle is None unless the operation is asynchronous; then the result is valid after
`handle.wait()`. fp8 codes travel as uint8 views, which every process-group backend can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.checks import function_or_none, switch
from ...common.numbers import with_article
from ..constants import dist_group_type
from ..runtime.checks import group_or_none, tensor
from ..runtime.warn_once import warn_once
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.quantizer import Quantizer
from ..tensor.storage.fsdp import gather_payload, join_payload
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage, matrix_shape
from .common_scale import payload_with_common_scale
from .faults import NamedWork, check_step, checks_step, form, started

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def world_size(group: dist_group_type | None = None) -> int:
    """Return the rank count of a group, 1 if torch.distributed is not initialized.

    Args:
        group: Process group; None for the default group.
    """
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: dist_group_type | None = None) -> int:
    """Return this process's rank in a group, 0 if torch.distributed is not initialized.

    Args:
        group: Process group; None for the default group.
    """
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


get_distributed_world_size, get_distributed_rank = world_size, rank  # original names


@dataclass(eq=False)
class AllOf:
    """Handle for several collectives, which `wait` all; only NCCL completes the collectives of a group in order."""

    works: Sequence[NamedWork]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class DeferredGather:
    """Handle for a quantized gather, whose `wait` builds the result from the received parts.

    Args:
        finish: Function that completes the result.
        output: The result, complete after `wait`.
        async_handle: Collective handle; None if the caller coalesces it with others and waits for all.
    """

    # Callers of several gathers set these to None, which frees buffers of NVIDIA's handle.
    columnwise_data_interleaved: None = None
    columnwise_scale_inv_interleaved: None = None

    def __init__(self, finish: Callable[[], object], output: Any, async_handle: Any) -> None:
        self.async_handle, self.output = async_handle, output
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        if self.async_handle is not None:
            self.async_handle.wait()
        finish, self._finish = self._finish, None
        finish()


def gather_along_first_dim(
    inp: Tensor | QuantizedTensorStorage,
    process_group: dist_group_type | None,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: Tensor | QuantizedTensorStorage | None = None,
    external_coalescing: bool = False,
) -> tuple[Any, NamedWork | DeferredGather | None]:
    """Gather [n * M, ...] from [M, ...] on each of n ranks, in rank order, and quantize it if a quantizer is given.

    Quantization after the gather needs no common scales. A quantized input is sent as codes and scales. If
    the ranks have different whole-tensor scales, codes are rounded to the largest scale; they are unchanged
    if the scales are equal, for example with a quantizer's `amax_reduction_group`. If the rows of a rank end
    inside a scale block, the input is dequantized, gathered and quantized again.

    Args:
        inp: This rank's rows [M, ...], plain or quantized.
        process_group: Process group.
        async_op: Return a handle to wait for instead of None.
        quantizer: Quantizer for the result.
        output_tensor: Receives the result [n * M, ...], plain or quantized like the result.
        external_coalescing: The caller coalesces collectives. The result is valid when that block
            ends, a quantized result when the handle has waited after it. Whole-tensor scales must
            then be equal, because their comparison is another kind of collective.

    Returns:
        The gathered rows and the handle, which is None unless the result is completed later.

    Raises:
        RuntimeError: On every rank, in the first step of the group: the inputs have different
            dtypes, shapes or quantized tensor classes. Coalesced collectives are not compared.
    """
    if isinstance(inp, (Tensor, QuantizedTensorStorage)) and not external_coalescing:
        group_or_none("process_group", process_group)
        if world_size(process_group) > 1 and checks_step(group := _group(process_group), inp):
            settings = {"collective": "gather_along_first_dim", "tensor": form(inp)}
            check_step(group, settings, inp.device)
    return gather_rows(inp, process_group, async_op, quantizer, output_tensor, external_coalescing)


def gather_rows(
    inp: Tensor | QuantizedTensorStorage,
    process_group: dist_group_type | None,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: Tensor | QuantizedTensorStorage | None = None,
    external_coalescing: bool = False,
) -> tuple[Any, NamedWork | DeferredGather | None]:
    """Compute `gather_along_first_dim`, without comparing the ranks' inputs."""
    if isinstance(inp, QuantizedTensorStorage) and world_size(process_group) > 1:
        rows_end_inside_block = matrix_shape(inp.shape)[0] % inp.row_granularity() != 0
        if rows_end_inside_block:
            inp, quantizer = _dequantized(inp, quantizer)
    quantized = isinstance(inp, QuantizedTensorStorage)
    if not quantized:
        _check(inp, process_group, async_op, "process_group")
    function_or_none("quantizer", quantizer)
    _check_output(inp, process_group, quantized or quantizer is not None, output_tensor)
    if (async_op or external_coalescing) and (quantized or quantizer is not None):
        return _gather_later(
            inp, process_group, async_op, quantizer, output_tensor, external_coalescing
        )
    if quantized:
        full: Any = inp
        if world_size(process_group) > 1:
            parts, payload = payload_with_common_scale(*gather_payload(inp), process_group)
            codes = [_gather(part, process_group, False)[0] for part in parts]
            full = join_payload(codes, payload, inp.dtype)
            if isinstance(inp, QuantizedTensor):
                full = type(inp).from_storage(full)
        if output_tensor is None:
            return full, None
        return _fill_output(output_tensor, full), None
    if quantizer is None:
        return _gather(inp, process_group, async_op, output_tensor)  # pyright: ignore[reportArgumentType]
    gathered, _ = _gather(inp, process_group, False)
    if output_tensor is None:
        return quantizer(gathered), None
    return quantizer.update_quantized(gathered, output_tensor), None  # pyright: ignore[reportArgumentType]


def _check_output(
    inp: Tensor | QuantizedTensorStorage,
    group: dist_group_type | None,
    quantized: bool,
    output: Any,
) -> None:
    """Raise an error, before any communication, unless output can hold the gathered rows of inp."""
    if output is None:
        return
    if isinstance(output, QuantizedTensorStorage) != quantized:
        raise TypeError(
            f"output_tensor is {with_article(type(output))}; the result is "
            f"{'quantized, give a tensor of its quantizer' if quantized else 'plain, give a plain tensor'}"
        )
    shape = (world_size(group) * inp.shape[0], *inp.shape[1:])
    if tuple(output.shape) != shape or (not quantized and output.dtype != inp.dtype):
        raise ValueError(
            f"output_tensor is {output.dtype} {list(output.shape)}; the gathered rows are {inp.dtype} {list(shape)}"
        )
    if not quantized and not output.is_contiguous():
        raise ValueError("output_tensor is not contiguous; give a contiguous one")


def _gather_later(
    inp: Tensor | QuantizedTensorStorage,
    group: dist_group_type | None,
    async_op: bool,
    quantizer: Quantizer | None,
    output: Any,
    scales_are_equal: bool,
) -> tuple[Any, DeferredGather | None]:
    """Return the quantized result, complete after `wait` of the handle, or no handle without communication."""
    if world_size(group) == 1:
        full = inp if isinstance(inp, QuantizedTensorStorage) else quantizer(inp)  # pyright: ignore
        return (full, None) if output is None else (_fill_output(output, full), None)
    if isinstance(inp, QuantizedTensorStorage):
        if output is None:
            maker: Any = quantizer or getattr(inp, "_quantizer", None) or inp._default_quantizer()
            shape = (world_size(group) * inp.shape[0], *inp.shape[1:])
            output = maker.make_empty(shape, dtype=inp.dtype, device=inp.device)
        parts, payload = gather_payload(inp)
        if not scales_are_equal:
            parts, payload = payload_with_common_scale(parts, payload, group)
        # As bytes: collectives that a caller coalesces have one dtype.
        sent = [_gather(part.view(torch.uint8), group, async_op) for part in parts]
        works = [work for _, work in sent if work is not None]
        handle = AllOf(works) if works else None

        def finish() -> None:
            arrived = [part.view(kind.dtype) for (part, _), kind in zip(sent, parts, strict=True)]
            _fill_output(output, join_payload(arrived, payload, inp.dtype))

        return output, DeferredGather(finish, output, handle)
    assert quantizer is not None
    gathered, handle = _gather(inp, group, async_op)
    if output is None:
        output = quantizer.make_empty(gathered.shape, dtype=inp.dtype, device=inp.device)
    return output, DeferredGather(
        lambda: quantizer.update_quantized(gathered, output), output, handle
    )


def _fill_output(output: Any, gathered: Any) -> Any:
    output.copy_from_storage(gathered)
    return output


def _dequantized(inp: QuantizedTensorStorage, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the values of a tensor whose blocks cannot be joined, and the quantizer for the gathered values."""
    quantizer = quantizer or getattr(inp, "_quantizer", None)
    rows, granularity = matrix_shape(inp.shape)[0], inp.row_granularity()
    if quantizer is None:
        raise ValueError(
            f"{with_article(type(inp))} of {rows} rows ends inside a block of {granularity} rows of one scale, "
            "where another rank's rows cannot follow; give a quantizer, or gather before quantizing"
        )
    warn_once(
        "gather of quantized rows that end inside a block",
        f"{with_article(type(inp))} of {rows} rows ends inside a block of {granularity} rows of one scale: it is "
        "gathered in high precision and quantized again; gather before quantizing",
    )
    return inp.dequantize(), quantizer


def _gather(
    inp: Tensor, group: dist_group_type | None, async_op: bool, output: Tensor | None = None
) -> tuple[Tensor, NamedWork | None]:
    """Gather all ranks' shards along the first dimension; FP8 codes are sent as bytes."""
    size = world_size(group)
    if size == 1:
        return (inp if output is None else output.copy_(inp)), None
    if inp.dtype in _FLOAT8:
        codes = None if output is None else output.view(torch.uint8)
        gathered, handle = _gather(inp.view(torch.uint8), group, async_op, codes)
        return (gathered.view(inp.dtype) if output is None else output), handle
    inp = inp.contiguous()
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        result = functional.wait_tensor(functional.all_gather_tensor(inp, 0, _group(group)))
        return (result if output is None else output.copy_(result)), None
    gathered = inp.new_empty((size * inp.shape[0], *inp.shape[1:])) if output is None else output
    return gathered, started(
        "all_gather",
        inp,
        group,
        lambda: dist.all_gather_into_tensor(gathered, inp, group=group, async_op=async_op),
    )


def reduce_scatter_along_first_dim(
    inp: Tensor,
    tp_group: dist_group_type | None,
    async_op: bool = False,
    output: Tensor | None = None,
) -> tuple[Tensor, NamedWork | None]:
    """Sum inp [M, ...] over n ranks and return this rank's rows [M / n, ...].

    Args:
        inp: Tensor [M, ...].
        tp_group: Process group.
        async_op: Return a handle to wait for instead of None.
        output: Receives the result.

    Returns:
        This rank's summed rows, and the handle or None.
    """
    _check(inp, tp_group, async_op)
    size = world_size(tp_group)
    if output is not None:
        tensor("output", output)
        shape = (inp.shape[0] // size, *inp.shape[1:])
        if tuple(output.shape) != shape or output.dtype != inp.dtype or not output.is_contiguous():
            raise ValueError(
                f"output is {output.dtype} {list(output.shape)} with strides {list(output.stride())}; "
                f"a rank's rows of the sum are {inp.dtype} {list(shape)}: give a contiguous tensor of that kind"
            )
    if size == 1:
        return (inp if output is None else output.copy_(inp)), None
    if inp.shape[0] % size:
        raise ValueError(
            f"the first dimension, {inp.shape[0]}, is not a multiple of the {size} ranks it is scattered to; "
            "pad the sequence"
        )
    inp = inp.contiguous()
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        reduced = functional.wait_tensor(
            functional.reduce_scatter_tensor(inp, "sum", 0, _group(tp_group))
        )
        return (reduced if output is None else output.copy_(reduced)), None
    scattered = inp.new_empty((inp.shape[0] // size, *inp.shape[1:])) if output is None else output
    return scattered, started(
        "reduce_scatter",
        inp,
        tp_group,
        lambda: dist.reduce_scatter_tensor(scattered, inp, group=tp_group, async_op=async_op),
    )


def allreduce(
    inp: Tensor, tp_group: dist_group_type | None = None, async_op: bool = False
) -> tuple[Tensor, NamedWork | None]:
    """Return the sum over the ranks, written to inp (under torch.compile: to a new tensor).

    Args:
        inp: Tensor with any shape.
        tp_group: Process group; None for the default group.
        async_op: Return a handle to wait for instead of None.

    Returns:
        The sum, and the handle or None.
    """
    _check(inp, tp_group, async_op)
    if world_size(tp_group) == 1:
        return inp, None
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.wait_tensor(functional.all_reduce(inp, "sum", _group(tp_group))), None
    return inp, started(
        "all_reduce", inp, tp_group, lambda: dist.all_reduce(inp, group=tp_group, async_op=async_op)
    )


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, tp_group: dist_group_type | None, new_buffer: bool = False
) -> Tensor:
    """Return this rank's share of the elements in a tensor, a vector [numel / n].

    Args:
        tensor: Contiguous tensor.
        tp_group: Group whose n ranks share the elements.
        new_buffer: Copy the elements; otherwise the vector is a view.

    Raises:
        ValueError: The ranks do not divide the element count.
    """
    size = world_size(tp_group)
    if tensor.numel() % size:
        raise ValueError(
            f"{size} ranks do not divide the {tensor.numel()} elements of a tensor; pad it to "
            f"{-(-tensor.numel() // size) * size}"
        )
    share = tensor.numel() // size
    part = tensor.view(-1)[rank(tp_group) * share : (rank(tp_group) + 1) * share]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: dist_group_type | None) -> Tensor:
    """Gather the shares that `split_tensor_into_1d_equal_chunks` returned on the ranks of a group into one vector.

    Args:
        tensor: This rank's share.
        tp_group: Group whose ranks share the elements.
    """
    return _gather(tensor.reshape(-1), tp_group, False)[0]


def _check(
    inp: Tensor, group: dist_group_type | None, async_op: bool, group_name: str = "tp_group"
) -> None:
    """Raise TypeError for invalid collective arguments."""
    tensor("inp", inp)
    group_or_none(group_name, group)
    switch("async_op", async_op)


def _group(group: dist_group_type | None) -> dist_group_type:
    return dist.group.WORLD if group is None else group  # pyright: ignore[reportReturnType]
