"""FP8 with one scale a tensor by kernels: one pass for a given scale, a pass for the maximum before it otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.formats import Element
from .. import exact
from ..kernels import Kernel
from ..launching import perform, run
from ..several_axes import call_on_axes
from .format_row import PlannedCall
from .spec import Given, Quantized, Request, jax_dtype

_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)


@dataclass(frozen=True)
class Maximum(Kernel):
    """x [rows, width] -> max|x| [1]"""

    @property
    def rule(self) -> str:
        return "r w -> o"

    maxed = (0,)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (_ONE,)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import cast  # it imports triton

        (amax,) = run(cast.absolute_maximum(arrays[0].size), arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class Cast(Kernel):
    """(x [rows, width], scale or maximum [1]) -> [codes], [codes_t], what a code is multiplied by [1], [maximum [1]]

    measures   a scale is given, 0 being read as 1, and max|x| found on the way; else a maximum is given, of which the
               scale is made
    """

    element: Element
    rowwise: bool
    columnwise: bool
    measures: bool
    power_of_two: bool
    epsilon: float

    @property
    def rule(self) -> str:
        made = ["r w"] * self.rowwise + ["w r"] * self.columnwise + ["i"] + ["o"] * self.measures
        return f"r w, s -> {', '.join(made)}"

    @property
    def maxed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.rowwise + self.columnwise + 1,) if self.measures else ()

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, width = operands[0].shape
        dtype = jax_dtype(self.element)
        shapes = [(rows, width)] * self.rowwise + [(width, rows)] * self.columnwise
        codes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return (*codes, *[_ONE] * (1 + self.measures))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import cast  # it imports triton

        x, given = arrays
        rows, width = x.shape
        program = cast.one_scale(
            (rows, width), self.element, self.rowwise, self.columnwise,
            cast.MEASURED if self.measures else cast.GIVEN, power_of_two=self.power_of_two, epsilon=self.epsilon,
            zero_is_one=self.measures,
        )  # fmt: skip
        inputs = [x, given] if self.measures else [x, None, given]
        codes, scale, codes_t, scale_t, amax = perform(program, inputs)
        made = (codes, codes_t, scale if self.rowwise else scale_t, amax if self.measures else None)
        return tuple(array for array in made if array is not None)


def plan(request: Request) -> PlannedCall:
    """The codes and scale of matrices, as one spec asks for them."""
    spec = request.spec
    directions, axis = (spec.element, spec.rowwise, spec.columnwise), request.axis

    def quantize(x: Array, given: Given) -> Quantized:
        counts = {"r": axis, "w": x.ndim - axis}
        if given.multiplier is not None:
            kernel, number = Cast(*directions, True, False, 0.0), given.multiplier
        else:
            kernel = Cast(*directions, False, spec.power_of_two, spec.epsilon)
            number = given.amax
            if number is None:
                number = exact.largest_over(call_on_axes(Maximum(), counts, x)[0], given.over)
        number = number.astype(jnp.float32).reshape(1)
        made = list(call_on_axes(kernel, counts, x, number))
        codes = made.pop(0) if spec.rowwise else None
        codes_t = made.pop(0) if spec.columnwise else None
        scale, found = made[0], exact.largest_over(made[1], given.over) if kernel.measures else number
        return Quantized(
            codes,
            scale if spec.rowwise else None,
            codes_t,
            scale if spec.columnwise else None,
            found if given.amax is None else given.amax,
        )

    return quantize
