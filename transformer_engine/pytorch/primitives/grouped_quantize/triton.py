"""Grouped quantization in one Triton launch, two where the scales of row groups come from their own maxima.

The groups' bits equal `quantize`'s kernel and reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT8, FLOAT32_MAX, ceil_div
from ....common.kernels.launch import ALIGNMENT, LARGEST_EXTENT, gluon_missing
from ...runtime.device import current_hardware
from ...runtime.launching import Performed, processors, run_program_into, unsupported_casts
from ..grouped_gemm import Groups, Matrices
from ..quantize import FORMATS, QuantizeSpec, torch_dtype
from .spec import Call, GroupedQuantized, GroupedQuantizeRequest, ScaleSlots

_WIDTH = 128
Inputs = tuple[Tensor, "Tensor | None", "Tensor | None"]  # values, addresses, group layout


def unsupported_reason(request: GroupedQuantizeRequest) -> str | None:
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if request.shape[0] == 0 or request.shape[1] == 0:
        return "there is nothing to quantize"
    if max(request.shape) >= LARGEST_EXTENT:
        return f"an extent of {list(request.shape)} reaches {LARGEST_EXTENT}"
    if request.matrices and request.shape[0] % 2:
        return f"{request.shape[0]} rows are odd: codes are transposed in pairs"
    return None


def bind(request: GroupedQuantizeRequest) -> Call:
    """Return the call that runs the planned launches; buffers for row groups depend on the groups."""
    spec = request.spec
    scaled = _exponent_program if spec.format.has_exponent_scales else _block_program
    quantize = (_tensor_program if spec.format == FLOAT8 else scaled)(request)

    def call(
        values: Tensor | Matrices, groups: Groups | None, slots: ScaleSlots | None
    ) -> GroupedQuantized:
        if isinstance(values, Matrices):
            inputs = (values.tensors[0], values.table, None)
            largest = values.shape[0]
            result = _space_for_matrices(spec, len(values.tensors), *values.shape, inputs[0].device)
        else:
            assert groups is not None
            inputs = (values.contiguous(), None, groups.layout)
            largest = None if groups.rows is None else max(groups.rows)
            depth = values.shape[1]
            codes_dtype = torch_dtype(spec.element)
            codes = codes_t = scale = scale_t = None
            if spec.rowwise:
                codes = torch.empty(groups.total, depth, dtype=codes_dtype, device=values.device)
            if spec.columnwise:
                columns = (
                    (groups.padded // _WIDTH, depth, _WIDTH)
                    if request.tiled
                    else (groups.padded * depth,)
                )
                codes_t = torch.empty(columns, dtype=codes_dtype, device=values.device)
            if spec.format == FLOAT8:
                inverse = torch.empty(groups.count, 4, dtype=torch.float32, device=values.device)
                result = GroupedQuantized(
                    codes,
                    inverse if spec.rowwise else None,
                    codes_t,
                    inverse if spec.columnwise else None,
                )
            else:
                if spec.rowwise:
                    blocks = ceil_div(depth, _WIDTH)
                    scale = torch.empty(
                        groups.total * blocks, dtype=torch.float32, device=values.device
                    )
                if spec.columnwise:
                    scale_t = torch.empty(
                        groups.padded // _WIDTH * depth, dtype=torch.float32, device=values.device
                    )
                result = GroupedQuantized(codes, scale, codes_t, scale_t)
        quantize(inputs, result, slots, largest)
        return result

    return call


def _block_program(request: GroupedQuantizeRequest) -> Callable[..., None]:
    from ....common.kernels import grouped_block_cast as kernels  # it imports triton

    spec = request.spec
    infinite = min(torch.finfo(request.dtype).max, FLOAT32_MAX)
    steps = (spec.element, spec.power_of_two, spec.epsilon, infinite, spec.rowwise, spec.columnwise)
    blocks = kernels.square_blocks if request.matrices else kernels.row_blocks
    more = {} if request.matrices else {"tiled": request.tiled}
    record = blocks(request.shape, request.groups, *steps, **more)

    def quantize(
        inputs: Inputs, outputs: GroupedQuantized, slots: ScaleSlots | None, largest: int | None
    ) -> None:
        run_program_into(record, (*inputs, *outputs[:4]), inputs[0].device)

    return quantize


def _exponent_program(request: GroupedQuantizeRequest) -> Callable[..., None]:
    spec = request.spec
    matrices = FORMATS[spec.format.name].matrices
    assert matrices is not None
    record = matrices(spec, request.shape, request.groups)

    def quantize(
        inputs: Inputs, outputs: GroupedQuantized, slots: ScaleSlots | None, largest: int | None
    ) -> None:
        run_program_into(record, (*inputs[:2], *outputs[:4]), inputs[0].device)

    return quantize


def _tensor_program(request: GroupedQuantizeRequest) -> Callable[..., None]:
    from ....common.kernels import grouped_cast as kernels  # it imports triton

    # Groups are measured in a launch before the cast. One launch that casts each group from the L2 cache after its
    # measurement is slower on an H200: 285 instead of 280 us for 64 x 1408 x 2048, 260 instead of 205 for 8 row groups.
    spec, by_rows = request.spec, not request.matrices
    how = (spec.element, spec.power_of_two, spec.epsilon, spec.rowwise, spec.columnwise)
    plain = (request.shape, request.groups, by_rows, *how)
    in_turn = Performed(kernels.tensor_scaled(*plain, request.slots, request.tiled), request.device)
    held = _held_program(request, plain)

    def quantize(
        inputs: Inputs, outputs: GroupedQuantized, slots: ScaleSlots | None, largest: int | None
    ) -> None:
        inverse = outputs.scale if outputs.scale is not None else outputs.scale_t
        results = [part for part in (outputs.codes, outputs.codes_t, inverse) if part is not None]
        states = () if slots is None else (slots.scale, slots.amax)
        perform = in_turn
        if held is not None and largest is not None and inputs[0].data_ptr() % ALIGNMENT == 0:
            performed, fits = held
            perform = performed if fits(largest) else in_turn
        perform(*inputs, *states, *results)

    return quantize


def _held_program(
    request: GroupedQuantizeRequest, plain: tuple[Any, ...]
) -> tuple[Performed, Callable[[int], bool]] | None:
    """Return the launch that measures and casts groups in one pass, and whether it supports a largest row count.

    None if the scales are given, on other GPUs than Hopper, and for values or extents that it does not support.
    """
    if request.slots is not None or request.device.type != "cuda":
        return None
    if gluon_missing(current_hardware()) is not None:
        return None
    from ....common.kernels import grouped_held_cast as kernels  # it imports triton

    count = processors(request.device.index).count
    by_rows, (rows, depth) = not request.matrices, request.shape
    fits = partial(
        kernels.fits,
        depth=depth,
        by_rows=by_rows,
        itemsize=request.dtype.itemsize,
        processors=count,
    )
    if not fits(1 if by_rows else rows):
        return None
    program = kernels.held_scaled(*plain, processors=count, tiled=request.tiled)
    return Performed(program, request.device), fits


def _space_for_matrices(
    spec: QuantizeSpec, count: int, rows: int, depth: int, device: torch.device
) -> GroupedQuantized:
    """Allocate codes and scales for count matrices [rows, depth]."""
    codes_dtype = torch_dtype(spec.element)
    codes = codes_t = scale = scale_t = None
    if spec.rowwise:
        codes = torch.empty(count, rows, depth, dtype=codes_dtype, device=device)
    if spec.columnwise:
        codes_t = torch.empty(count, depth, rows, dtype=codes_dtype, device=device)
    if spec.format == FLOAT8:
        inverse = torch.empty(count, 4, dtype=torch.float32, device=device)
        return GroupedQuantized(
            codes, inverse if spec.rowwise else None, codes_t, inverse if spec.columnwise else None
        )
    if spec.format.has_exponent_scales:
        length = spec.format.length
        exponents = partial(torch.empty, dtype=torch.uint8, device=device)
        scale = exponents(count, rows, ceil_div(depth, length)) if spec.rowwise else None
        scale_t = exponents(count, depth, ceil_div(rows, length)) if spec.columnwise else None
        return GroupedQuantized(codes, scale, codes_t, scale_t)
    blocks = (ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH))
    if spec.rowwise:
        scale = torch.empty(count, *blocks, dtype=torch.float32, device=device)
    if spec.columnwise:
        scale_t = torch.empty(count, *blocks[::-1], dtype=torch.float32, device=device)
    return GroupedQuantized(codes, scale, codes_t, scale_t)


BACKEND: Backend[GroupedQuantizeRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind
)
