"""GroupedQuantizer: the quantizers of one role in all groups as one, where a single launch can do their work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ..primitives.grouped_gemm import Groups, Matrices
from ..primitives.grouped_quantize import GroupedQuantized, ScaleSlots, quantize_matrices, quantize_rows
from ..primitives.quantize import QuantizeSpec
from ..tensor.elements import element_of
from ..tensor.float8_blockwise_tensor import Float8BlockQuantizer
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from ..tensor.quantizer import Quantizer


class GroupedQuantizer:
    """Codes of every group as its own quantizer would make them, recorded maxima included.

    format                  of the codes: FLOAT8, BLOCK_1D or BLOCK_2D
    state, offset, stride   of delayed scaling: where the groups' slots are in its tensors, which may be replaced
                            between two calls
    """

    def __init__(self, spec: QuantizeSpec, state: Any = None, offset: int = 0, stride: int = 0):
        self._both = spec
        self.format = spec.format
        self._state, self._offset, self._stride = state, offset, stride

    def rows(self, x: Tensor, groups: Groups, rowwise: bool, columnwise: bool) -> GroupedQuantized:
        """Groups of rows of x [total, K]."""
        return quantize_rows(x, groups, _towards(self._both, rowwise, columnwise), self._slots())

    def matrices(self, matrices: Matrices, rowwise: bool, columnwise: bool) -> GroupedQuantized:
        """One matrix a group."""
        return quantize_matrices(matrices, _towards(self._both, rowwise, columnwise), self._slots())

    def _slots(self) -> ScaleSlots | None:
        state = self._state
        if state is None:
            return None
        return ScaleSlots(state.scale, state.amax_history, self._stride, self._offset)


@functools.cache
def _towards(spec: QuantizeSpec, rowwise: bool, columnwise: bool) -> QuantizeSpec:
    return QuantizeSpec(
        spec.format,
        spec.element,
        rowwise,
        columnwise,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
    )


def grouped(quantizers: Sequence[Quantizer], of_matrices: bool) -> GroupedQuantizer | None:
    """The quantizers of one role as one; None where they have to work one by one.

    of_matrices   they quantize weights, which have 128x128 blocks where rows have 1x128
    """
    first = quantizers[0]
    if isinstance(first, Float8Quantizer):
        # Slots of one state, equally far apart.
        slots = [(q._state, q._index, q.dtype) for q in quantizers if isinstance(q, Float8Quantizer)]
        state, offset, dtype = slots[0]
        stride = slots[1][1] - offset if len(slots) > 1 else 1
        regular = [(state, offset + i * stride, dtype) for i in range(len(quantizers))]
        if state is None or slots != regular:
            return None
        return GroupedQuantizer(QuantizeSpec(FLOAT8, element_of(dtype)), state, offset, stride)
    if any(quantizer != first for quantizer in quantizers):
        return None
    if isinstance(first, Float8CurrentScalingQuantizer) and not first.with_amax_reduction:
        return GroupedQuantizer(
            QuantizeSpec(
                FLOAT8,
                element_of(first.dtype),
                power_of_two=first.force_pow_2_scales,
                epsilon=first.amax_epsilon,
            )
        )
    if isinstance(first, Float8BlockQuantizer):
        spec = first.spec(True, True)
        if spec.format == (BLOCK_2D if of_matrices else BLOCK_1D):
            return GroupedQuantizer(spec)
    return None
