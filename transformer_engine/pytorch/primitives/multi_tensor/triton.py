"""Operations on tensor lists on GPUs: one launch for all elements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.memory import Memory
from ....common.operation_settings import CHUNK, STATE_BLOCK, Adam, Sgd
from ...runtime.launching import DTYPE_NAMES, run, unsupported_elementwise
from . import reference
from .addresses import Extents, Lists, chunk_table
from .reference import MultiTensorRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch

_NAMES = {**DTYPE_NAMES, torch.int16: "int16", torch.uint8: "uint8"}
_REMEMBERED = 1 << 10


def unsupported_reason(request: MultiTensorRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    integer_dtypes = (torch.int16, torch.uint8) if request.operation == "adam" else ()
    return unsupported_elementwise(
        request.device, *[kind for kind in request.kinds if kind not in integer_dtypes]
    )


def bind(request: MultiTensorRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    captured = reference.bind(request)
    kinds = tuple(_NAMES[kind] for kind in request.kinds)
    entries = _entries(request)

    def write(lists: Lists, extents: Extents, numbers: Tensor, flag: Tensor | None) -> None:
        chunks = chunk_table(lists, extents, CHUNK, entries)
        if chunks is None:
            warnings.warn(
                f"a CUDA graph is capturing {request.operation} of tensors with new addresses, which cannot be copied "
                "to the device during capture, so that each tensor takes several launches; keep the captured "
                "gradients with zero_grad(set_to_none=False) in the previous steps for a single launch",
                UserWarning,
                stacklevel=2,
            )
            captured(lists, extents, numbers, flag)
        elif chunks.table.shape[0]:
            launch = _launches[
                request.operation, kinds, request.how, chunks.table.shape[0], chunks.aligned
            ]
            run(launch, (chunks.table, numbers, flag))

    def squares(lists: Lists, extents: Extents, factor: Tensor | None) -> Tensor:
        chunks = chunk_table(lists, extents, CHUNK)
        if chunks is None:
            return captured(lists, extents, factor)
        if chunks.table.shape[0] == 0:
            return chunks.each.to(torch.float32)
        launch = _launches["squares", kinds, None, chunks.table.shape[0], chunks.aligned]
        (partials,) = run(launch, (chunks.table, factor))
        return torch.segment_reduce(partials, "sum", lengths=chunks.each, unsafe=True, initial=0.0)

    return squares if request.operation == "squares" else write


def _entries(request: MultiTensorRequest) -> tuple[int, ...]:
    """Elements per entry of each list: exponents belong to blocks."""
    count, how = len(request.kinds), request.how
    if isinstance(how, Adam) and how.block_scaled:
        return (1,) * 4 + (STATE_BLOCK,) * 2 + (1,) * (count - 6)
    return (1,) * count


def _launch(key: tuple[str, tuple[str, ...], Adam | Sgd | None, int, bool]) -> Launch:
    from ....common.kernels import multi_tensor as kernels

    operation, kinds, how, chunks, aligned = key
    if operation == "scale":
        return kernels.scale(chunks, kinds, aligned)
    if operation == "squares":
        return kernels.squares(chunks, kinds[0], aligned)
    if isinstance(how, Sgd):
        return kernels.sgd(chunks, kinds, how, aligned)
    assert how is not None
    return kernels.adam(chunks, kinds, how, aligned)


_launches: Memory[tuple[Any, ...], Launch] = Memory(_launch, _REMEMBERED)

BACKEND: Backend[MultiTensorRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind
)
