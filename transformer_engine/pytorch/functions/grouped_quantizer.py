"""GroupedQuantizer: quantizers for one tensor role in all groups, whose casts share one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...common import optional
from ...common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, TensorFormat
from ...common.hardware import NO_GPU
from ..primitives.grouped_gemm import Groups, Matrices, tiles_columns
from ..primitives.grouped_quantize import (
    GroupedQuantized,
    ScaleSlots,
    quantize_matrices,
    quantize_matrices_separately,
    quantize_rows,
    quantize_rows_separately,
)
from ..primitives.quantize import Quantized, QuantizeSpec
from ..runtime.device import current_hardware
from ..tensor.block_scaling import BlockScalingQuantizer
from ..tensor.elements import find_element
from ..tensor.float8_blockwise_tensor import Float8BlockQuantizer
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from ..tensor.quantizer import Quantizer

ROW_MULTIPLE = (
    32  # for group rows with one-byte block scales; equal to common/kernels/grouped_scaled
)


class GroupedQuantizer:
    """Quantizer for all groups, with the codes and recorded maxima of each group's own quantizer.

    Args:
        spec: Target format and scaling. The format is FLOAT8, BLOCK_1D, BLOCK_2D, MXFP8 or NVFP4.
        state: Delayed-scaling state, or None. Its tensors may be replaced between two calls.
        offset: Index of the first group's slot in the tensors of `state`.
        stride: Distance between the slots of consecutive groups.
        quantize_one: Function that quantizes one group's matrix, for formats with two scale levels.
            None: one launch quantizes all groups.
    """

    def __init__(
        self,
        spec: QuantizeSpec,
        state: Any = None,
        offset: int = 0,
        stride: int = 0,
        quantize_one: Callable[[Tensor, QuantizeSpec], Quantized] | None = None,
    ):
        self._both = spec
        self.format = spec.format
        self._state, self._offset, self._stride = state, offset, stride
        self._quantize_one = quantize_one

    @property
    def multiple(self) -> int:
        """Divisor of group row counts and weight extents."""
        return ROW_MULTIPLE if self.format.swizzled else 1

    def rows(self, x: Tensor, groups: Groups, rowwise: bool, columnwise: bool) -> GroupedQuantized:
        """Quantize row groups of x [total, K] in the requested directions."""
        spec = _towards(self._both, rowwise, columnwise)
        if self._quantize_one is not None:
            return quantize_rows_separately(x, groups, spec, self._quantize_one)
        tiled = columnwise and tiles_columns(spec.format, groups.count, x.device)
        return quantize_rows(x, groups, spec, self._slots(), tiled=tiled)

    def matrices(self, matrices: Matrices, rowwise: bool, columnwise: bool) -> GroupedQuantized:
        """Quantize one matrix per group in the requested directions."""
        spec = _towards(self._both, rowwise, columnwise)
        if self._quantize_one is not None:
            return quantize_matrices_separately(matrices, spec, self._quantize_one)
        return quantize_matrices(matrices, spec, self._slots())

    def _slots(self) -> ScaleSlots | None:
        state = self._state
        if state is None:
            return None
        return ScaleSlots(state.scale, state.amax_history, self._stride, self._offset)


@functools.cache
def _towards(spec: QuantizeSpec, rowwise: bool, columnwise: bool) -> QuantizeSpec:
    return replace(spec, rowwise=rowwise, columnwise=columnwise)


def grouped(quantizers: Sequence[Quantizer], of_matrices: bool) -> GroupedQuantizer | None:
    """Combine the quantizers for one tensor role; return None if the groups must be quantized separately.

    Args:
        quantizers: Quantizer per group, in order.
        of_matrices: Whether they quantize weights, which have 128x128 blocks; rows have 1x128 blocks.
    """
    first = quantizers[0]
    if isinstance(first, Float8Quantizer):
        # A strided kernel needs slots in one state at equal distances.
        slots = [
            (q._state, q._index, q.dtype) for q in quantizers if isinstance(q, Float8Quantizer)
        ]
        state, offset, dtype = slots[0]
        stride = slots[1][1] - offset if len(slots) > 1 else 1
        regular = [(state, offset + i * stride, dtype) for i in range(len(quantizers))]
        if state is None or slots != regular:
            return None
        return GroupedQuantizer(QuantizeSpec(FLOAT8, find_element(dtype)), state, offset, stride)
    if any(quantizer != first for quantizer in quantizers):
        return None
    if isinstance(first, Float8CurrentScalingQuantizer) and not first.with_amax_reduction:
        return GroupedQuantizer(
            QuantizeSpec(
                FLOAT8,
                find_element(first.dtype),
                power_of_two=first.force_pow_2_scales,
                epsilon=first.amax_epsilon,
            )
        )
    if isinstance(first, Float8BlockQuantizer):
        spec = first.spec(True, True)
        if spec.format == (BLOCK_2D if of_matrices else BLOCK_1D):
            return GroupedQuantizer(spec)
    if isinstance(first, BlockScalingQuantizer) and first.makes_tiles:
        spec = first.spec(True, True)
        if (
            spec.format.has_exponent_scales
            and (of_matrices or not spec.two_dimensional)
            and not _is_outdated(spec.format)
        ):
            return GroupedQuantizer(spec)
        # Casts are one per group either way: only a product in one launch saves time.
        products = spec.format.levels is not None and not (of_matrices and spec.format.row_scaled)
        if products and (current_hardware() is NO_GPU or _is_native(spec.format)):
            return GroupedQuantizer(spec, quantize_one=first._quantized)
    return None


def _is_native(tensor_format: TensorFormat) -> bool:
    """Whether the GPU's tensor cores read the block scales, and the installed Triton emits their instruction."""
    needs, hardware = tensor_format.block_products, current_hardware()
    if needs is None or not hardware.has(needs):
        return False
    return optional.scaled_dot_problem(hardware, optional.release("triton")) is None


def _is_outdated(tensor_format: TensorFormat) -> bool:
    """Whether Triton is too old for the GPU's instruction: a loop over library products is native then."""
    needs = tensor_format.block_products
    return needs is not None and current_hardware().has(needs) and not _is_native(tensor_format)
