"""Token permutations on GPUs: every row read once and written once, one program per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, perform, run, unsupported_elementwise
from .reference import MASK, PermutationRequest

_NAMES = {**DTYPE_NAMES, torch.uint8: "uint8"}  # codes are moved as bytes
_EXPERTS = 4096  # columns that a program can hold
_CHUNKS = 1024
_LIMIT = 1 << 31  # rows are numbered in 32 bits
_COUNTED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def unsupported_reason(request: PermutationRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if max(request.rows, request.shape[0]) >= _LIMIT:
        return f"{max(request.rows, request.shape[0])} rows; it numbers fewer than {_LIMIT}"
    if request.operation in ("map", "chunks", "segments"):
        if request.dtype not in _COUNTED:
            return f"the map is made of {request.dtype}; supported: integers and bool"
        width, most = request.shape[1], _EXPERTS if request.operation == "map" else _CHUNKS
        if width > most and request.operation != "segments":
            return f"{width} {'experts' if request.operation == 'map' else 'chunks'} > {most}"
        return unsupported_elementwise(request.device)
    if request.columns > _EXPERTS:
        return f"{request.columns} experts > {_EXPERTS}"
    moves_bytes = request.operation == "send" and request.dtype == torch.uint8
    values = () if moves_bytes else (request.dtype,)
    return unsupported_elementwise(
        request.device, *values, *(() if request.weights is None else (request.weights,))
    )


def bind(request: PermutationRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    return {
        "map": _map,
        "chunks": _chunks,
        "segments": _segments,
        "send": _send,
        "collect": _collect,
        "send_weighted": _send_weighted,
    }[request.operation](request)


def _map(request: PermutationRequest) -> Callable[[Tensor], Tensor]:
    tokens, experts = request.shape
    if tokens * experts == 0:
        return lambda mask: torch.zeros(
            tokens, 2 * experts + 1, dtype=torch.int32, device=mask.device
        )
    from ....common.kernels import routes

    program = routes.map_of_mask(tokens, experts, request.strides)
    return lambda mask: perform(
        program, (mask.view(torch.uint8) if mask.dtype is torch.bool else mask,)
    )[0]


def _chunks(request: PermutationRequest) -> Callable[[Tensor, Tensor], Tensor]:
    tokens, chunks = request.shape
    if tokens * chunks == 0:
        return lambda splits, order: torch.arange(tokens, dtype=torch.int32, device=splits.device)
    from ....common.kernels import routes

    program = routes.map_of_chunks(tokens, chunks)
    return lambda splits, order: perform(program, (splits.contiguous(), order.contiguous()))[
        0
    ].view(-1)


def _segments(request: PermutationRequest) -> Callable[[Tensor], Tensor]:
    tokens, count = request.shape
    if tokens * count == 0:
        return lambda segments: torch.arange(tokens, dtype=torch.int32, device=segments.device)
    from ....common.kernels import routes

    launch = routes.map_of_segments(tokens, count)
    return lambda segments: run(launch, (segments.contiguous(),))[0].view(-1)


def _send(request: PermutationRequest) -> Callable[..., tuple[Tensor, Tensor | None]]:
    (_, hidden), rows, weights = request.shape, request.rows, request.weights
    if _is_empty(request):
        return lambda x, map, pad_offsets, probs: (
            x.new_zeros(rows, hidden),
            None if probs is None else probs.new_zeros(rows),
        )
    from ....common.kernels import permutation

    probs = None if weights is None else _NAMES[weights]
    by_mask, dtype = request.layout == MASK, _NAMES[request.dtype]
    program = permutation.send(
        request.shape, rows, request.columns, by_mask, dtype, probs, request.every_row
    )

    def send(x: Tensor, map: Tensor, pad_offsets: Tensor | None, probs: Tensor | None) -> Any:
        return tuple(
            perform(
                program,
                (x.contiguous(), map, pad_offsets, None if probs is None else probs.contiguous()),
            )
        )

    return send


def _collect(request: PermutationRequest) -> Callable[..., tuple[Tensor, Tensor | None]]:
    (tokens, hidden), columns = request.shape, request.columns
    if _is_empty(request):
        return lambda y, map, pad_offsets, weights, row_values: (
            y.new_zeros(tokens, hidden),
            None if row_values is None else row_values.new_zeros(tokens, columns),
        )
    from ....common.kernels import permutation

    by_mask, dtype = request.layout == MASK, _NAMES[request.dtype]
    names = {
        values: None if values is None else _NAMES[values] for values in (None, request.weights)
    }
    launches = {
        values: permutation.collect(request.shape, request.rows, columns, by_mask, dtype, name)
        for values, name in names.items()
    }

    def collect(
        y: Tensor,
        map: Tensor,
        pad_offsets: Tensor | None,
        weights: Tensor | None,
        row_values: Tensor | None,
    ) -> Any:
        launch = launches[None if row_values is None else row_values.dtype]
        weights = None if weights is None else weights.contiguous()
        row_values = None if row_values is None else row_values.contiguous()
        return tuple(run(launch, (y.contiguous(), map, pad_offsets, weights, row_values)))

    return collect


def _send_weighted(request: PermutationRequest) -> Callable[..., tuple[Tensor, Tensor | None]]:
    (tokens, hidden), rows, columns = request.shape, request.rows, request.columns
    if _is_empty(request):
        return lambda dx, map, pad_offsets, weights, y: (
            dx.new_zeros(rows, hidden),
            None if y is None else weights.new_zeros(tokens, columns),
        )
    from ....common.kernels import permutation

    dtypes = (_NAMES[request.dtype], None if request.weights is None else _NAMES[request.weights])
    program = permutation.send_weighted(
        request.shape, rows, columns, request.layout == MASK, dtypes
    )

    def send_weighted(
        dx: Tensor, map: Tensor, pad_offsets: Tensor | None, weights: Tensor, y: Tensor | None
    ) -> Any:
        y = None if y is None else y.contiguous()
        return tuple(perform(program, (dx.contiguous(), map, pad_offsets, weights.contiguous(), y)))

    return send_weighted


def _is_empty(request: PermutationRequest) -> bool:
    return request.shape[0] * request.shape[1] * request.rows * request.columns == 0


BACKEND: Backend[PermutationRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
