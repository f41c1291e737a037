"""Grouped quantization in one Triton launch, two where the scales come from the values' own maxima.

The groups' bits are those of `quantize`'s kernel and reference (NaN codes may differ in their sign).
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT8, FLOAT32_MAX, ceil_div
from ....common.kernels import launch
from ..grouped_gemm import Groups, Matrices
from ..launching import refuses_casts
from ..quantize import QuantizeSpec, torch_dtype
from .spec import GroupedQuantized, GroupedQuantizeRequest, ScaleSlots

_WIDTH = 128


def refuses(request: GroupedQuantizeRequest) -> str | None:
    if (reason := refuses_casts(request.device, request.dtype)) is not None:
        return reason
    if request.shape[0] == 0 or request.shape[1] == 0:
        return "there is nothing to quantize"
    if request.matrices and request.shape[0] % 2:
        return f"{request.shape[0]} rows are odd: codes are transposed in pairs"
    return None


def run(
    values: Tensor | Matrices, groups: Groups | None, spec: QuantizeSpec, slots: ScaleSlots | None
) -> GroupedQuantized:
    first = values.tensors[0] if isinstance(values, Matrices) else values
    device = first.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(values, groups, spec, slots, device)
    return _run(values, groups, spec, slots, device)


def _run(
    values: Tensor | Matrices,
    groups: Groups | None,
    spec: QuantizeSpec,
    slots: ScaleSlots | None,
    device: int,
) -> GroupedQuantized:
    if isinstance(values, Matrices):
        inputs = (values.tensors[0], values.table, None)
        count, shape = len(values.tensors), values.shape
        made = _space_for_matrices(spec, count, *shape, inputs[0].device)
    else:
        assert groups is not None
        inputs = (values.contiguous(), None, groups.layout)
        count, shape = groups.count, (values.shape[0], values.shape[1])
        made = _space_for_rows(spec, groups, shape[1], values.device)
    by_rows = groups is not None
    if spec.format == FLOAT8:
        _by_tensor(inputs, by_rows, shape, count, spec, slots, made, device)
    else:
        dtype = inputs[0].dtype
        launch.start(_block_launch(spec, by_rows, shape, count, dtype), (*inputs, *made), device)
    return made


def _by_tensor(
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    by_rows: bool,
    shape: tuple[int, int],
    count: int,
    spec: QuantizeSpec,
    slots: ScaleSlots | None,
    made: GroupedQuantized,
    device: int,
) -> None:
    kernels = _kernels()
    if slots is None:
        scale, stride, offset = None, 0, 0
        amax = torch.zeros(count, dtype=torch.float32, device=inputs[0].device)
        measure = kernels.maximum(shape, count, by_rows)
        launch.start(measure, (*inputs, amax), device)
    else:
        scale, amax, stride, offset = slots
    steps = (spec.element, stride, offset, spec.power_of_two, spec.epsilon, spec.rowwise, spec.columnwise)
    cast = kernels.cast(shape, count, by_rows, *steps, records=scale is not None)
    inverse = made.scale if made.scale is not None else made.scale_t
    launch.start(cast, (*inputs, scale, amax, made.codes, made.codes_t, inverse), device)


@functools.lru_cache(maxsize=1024)
def _block_launch(
    spec: QuantizeSpec, by_rows: bool, shape: tuple[int, int], count: int, dtype: torch.dtype
) -> launch.Launch:
    infinite = min(torch.finfo(dtype).max, FLOAT32_MAX)
    steps = (spec.element, spec.power_of_two, spec.epsilon, infinite, spec.rowwise, spec.columnwise)
    from ....common.kernels import grouped_block_cast as kernels  # it imports triton

    return (kernels.row_blocks if by_rows else kernels.square_blocks)(shape, count, *steps)


def _space_for_rows(spec: QuantizeSpec, groups: Groups, depth: int, device: torch.device) -> GroupedQuantized:
    """Room for the codes and scales of groups of rows [total, depth]."""
    codes_dtype = torch_dtype(spec.element)
    codes = codes_t = scale = scale_t = None
    if spec.rowwise:
        codes = torch.empty(groups.total, depth, dtype=codes_dtype, device=device)
    if spec.columnwise:
        codes_t = torch.empty(groups.padded * depth, dtype=codes_dtype, device=device)
    if spec.format == FLOAT8:
        inverse = torch.empty(groups.count, 4, dtype=torch.float32, device=device)
        return GroupedQuantized(
            codes, inverse if spec.rowwise else None, codes_t, inverse if spec.columnwise else None
        )
    if spec.rowwise:
        blocks = ceil_div(depth, _WIDTH)
        scale = torch.empty(groups.total * blocks, dtype=torch.float32, device=device)
    if spec.columnwise:
        scale_t = torch.empty(groups.padded // _WIDTH * depth, dtype=torch.float32, device=device)
    return GroupedQuantized(codes, scale, codes_t, scale_t)


def _space_for_matrices(
    spec: QuantizeSpec, count: int, rows: int, depth: int, device: torch.device
) -> GroupedQuantized:
    """Room for the codes and scales of count matrices [rows, depth]."""
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
    blocks = (ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH))
    if spec.rowwise:
        scale = torch.empty(count, *blocks, dtype=torch.float32, device=device)
    if spec.columnwise:
        scale_t = torch.empty(count, *blocks[::-1], dtype=torch.float32, device=device)
    return GroupedQuantized(codes, scale, codes_t, scale_t)


@functools.cache
def _kernels() -> ModuleType:
    """The kernel file, which imports triton."""
    from ....common.kernels import grouped_cast

    return grouped_cast


BACKEND = Backend[GroupedQuantizeRequest]("triton", run, refuses)
