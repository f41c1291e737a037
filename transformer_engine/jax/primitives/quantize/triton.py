"""Quantization on NVIDIA GPUs by Triton kernels, bit-equal to the reference, and by kernels that produce the values.

Where a kernel quantizes its own result, codes, scales and maxima equal the two-step results: the result is rounded to
its dtype before it is scaled.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ....common.kernels.launch import LARGEST_EXTENT
from ...runtime.platform import hardware
from ..launching import platform_failure
from .elements import value_for_inf
from .formats import FORMATS
from .spec import Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec

if TYPE_CHECKING:
    from ....common.kernels.block_cast import Blocks
    from ....common.kernels.cast import OneScale

_NAMES = ("QuantizePrimitive", "DBiasQuantizePrimitive")


def unsupported_reason(request: QuantizeRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    for name in _NAMES:
        if (reason := platform_failure(request.platform, name)) is not None:
            return reason
    if (reason := hardware().lacks("cast kernels")) is not None:
        return reason
    if request.maxima_per_tile and request.axis != 1:
        return (
            "one maximum per tile of an array of several axes; the kernels read those of a matrix"
        )
    rows, depth = request.shape
    if not rows * depth:
        return "a matrix without elements"
    if max(rows, depth) >= LARGEST_EXTENT:
        return f"{rows} rows or {depth} columns reach {LARGEST_EXTENT}"
    return None


def run(x: Array, inputs: QuantizeInputs, request: QuantizeRequest) -> Quantized:
    """Compute a request with the kernels of its format."""
    return FORMATS[request.spec.format.name].quantize_by_kernels(x, inputs, request)


BACKEND: Backend[QuantizeRequest] = Backend(
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: functools.partial(run, request=request),
)


def unsupported_in_producer(request: QuantizeRequest) -> str | None:
    """Reason why no kernel that produces values can quantize them, or None."""
    if request.spec.format not in (FLOAT8, BLOCK_1D, BLOCK_2D):
        return f"format {request.spec.format.name}; kernels make codes of FLOAT8 and of blocks where values are made"
    if not request.spec.rowwise:
        return "column-wise codes alone; kernels make row-wise ones too"
    return unsupported_reason(request)


def one_scale(spec: QuantizeSpec) -> OneScale:
    """Build a kernel spec for a given multiplier, where 0 is read as 1; the maximum is a result."""
    from ....common.kernels.cast import OneScale

    return OneScale(
        spec.element,
        spec.columnwise,
        given=True,
        records=False,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        zero_is_one=True,
    )


def blocks(spec: QuantizeSpec, dtype: jnp.dtype) -> Blocks:
    """Build a kernel spec with block scales, for a result that is rounded to dtype."""
    from ....common.kernels.block_cast import Blocks

    square = spec.format == BLOCK_2D
    scaling = (spec.power_of_two, spec.epsilon, value_for_inf(dtype))
    return Blocks(spec.element, spec.columnwise, square, *scaling)
