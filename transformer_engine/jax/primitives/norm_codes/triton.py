"""Codes where the kernel of common/kernels/norm.py makes the values, which holds whole rows of x [rows, width].

By a given scale, in blocks of 1 x 128 in rows alone, or by the maximum that the kernel has found, in a second pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, ceil_div
from ...platform import processors
from ..kernels import Kernel
from ..launching import perform, run
from ..norm import triton as norm
from ..quantize import FORMATS, Quantized, QuantizeSpec, Request, fused_codes, jax_dtype
from ..quantize.spec import Given
from ..several_axes import call_on_axes, with_rows
from .request import How, NormCodesRequest

if TYPE_CHECKING:
    from ....common.kernels.norm import NormRows

_WIDEST_CENTERED = (
    4096  # columns of a LayerNorm that makes the codes of blocks: beyond, its registers do not suffice
)
_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)


def refuses(request: NormCodesRequest) -> str | None:
    if (reason := norm.refuses(request.norm) or fused_codes.refuses(request.cast)) is not None:
        return reason
    spec = request.cast.spec
    if not fused_codes.in_blocks(spec):
        return None
    if spec.format != BLOCK_1D or spec.columnwise:
        return "blocks that span rows; the kernel that makes y holds single rows"
    if request.centered and request.norm.width > _WIDEST_CENTERED:
        return (
            f"blocks of a LayerNorm of {request.norm.width} columns; it makes them up to {_WIDEST_CENTERED}"
        )
    return None


@dataclass(frozen=True)
class _Norm(Kernel):
    """(x [rows, width], gamma, [beta], ..) -> .., [mean [rows]], rstdev [rows]"""

    centered: bool
    zero_centered: bool
    epsilon: float
    whole = ("w",)

    @property
    def given(self) -> str:
        return "r w, w, w" if self.centered else "r w, w"

    @property
    def statistics(self) -> list[str]:
        return ["r", "r"] if self.centered else ["r"]

    def with_statistics(self, x: Any, *made: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
        statistic = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        return (*made, *[statistic for _ in self.statistics])

    def rows(self, x: Array) -> NormRows:
        from ....common.kernels.norm import NormRows  # it imports triton

        rows, width = x.shape
        norms = (self.epsilon, self.zero_centered, self.centered)
        return NormRows(rows, width, width, x.dtype.name, *norms, processors().count)


@dataclass(frozen=True)
class Scaled(_Norm):
    """(x, gamma, [beta], multiplier [1]) -> codes, [codes_t], what a code is multiplied by [1], max|y| [1], .."""

    spec: QuantizeSpec

    @property
    def rule(self) -> str:
        codes = ["r w", "w r"] if self.spec.columnwise else ["r w"]
        return f"{self.given}, s -> {', '.join([*codes, 'i', 'o', *self.statistics])}"

    @property
    def maxed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (2 + self.spec.columnwise,)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x, dtype = operands[0], jax_dtype(self.spec.element)
        shapes = [x.shape, x.shape[::-1]] if self.spec.columnwise else [x.shape]
        codes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return self.with_statistics(x, *codes, _ONE, _ONE)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm_codes  # it imports triton

        x, gamma, *beta, multiplier = arrays
        program = norm_codes.one_scale(self.rows(x), fused_codes.one_scale(self.spec))
        inputs = [x, gamma, beta[0] if beta else None, multiplier, None]
        codes, scale, codes_t, _, amax, *statistics = perform(program, inputs)
        return tuple(made for made in (codes, codes_t, scale, amax, *statistics) if made is not None)


@dataclass(frozen=True)
class Measured(_Norm):
    """(x, gamma, [beta]) -> max|y| [1], y like x, .."""

    maxed = (0,)

    @property
    def rule(self) -> str:
        return f"{self.given} -> {', '.join(['o', 'r w', *self.statistics])}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        return self.with_statistics(x, _ONE, jax.ShapeDtypeStruct(x.shape, x.dtype))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm  # it imports triton

        x, gamma, *beta = arrays
        made = run(norm.forward(self.rows(x), measures=True), [x, gamma, beta[0] if beta else None, None])
        return tuple(array for array in made if array is not None)


@dataclass(frozen=True)
class RowBlocks(_Norm):
    """(x, gamma, [beta]) -> codes, what codes are multiplied by [rows, ceil(width / 128)], .."""

    whole = ("w", "b")
    spec: QuantizeSpec

    @property
    def rule(self) -> str:
        made = ["r w", "r b", *self.statistics]
        return f"{self.given} -> {', '.join(made)}"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        codes = jax.ShapeDtypeStruct(x.shape, jax_dtype(self.spec.element))
        scales = jax.ShapeDtypeStruct((x.shape[0], ceil_div(x.shape[1], 128)), jnp.float32)
        return self.with_statistics(x, codes, scales)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm_codes  # it imports triton

        x, gamma, *beta = arrays
        program = norm_codes.row_blocks(self.rows(x), fused_codes.blocks(self.spec, x.dtype))
        made = perform(program, [x, gamma, beta[0] if beta else None])
        return tuple(array for array in made if array is not None)


def bind(request: NormCodesRequest) -> Callable[..., Any]:
    return functools.partial(_run, cast=request.cast)


def _run(
    x: Array, gamma: Array, beta: Array | None, scale: Array | None, how: How, cast: Request
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    norm_of, spec = (how.centered, how.zero_centered, how.epsilon), how.spec
    of_rows, count = with_rows(x, 1)
    given = [of_rows, gamma, *([] if beta is None else [beta])]
    counts = {"r": count}
    if fused_codes.in_blocks(spec):
        codes, scales, *statistics = call_on_axes(RowBlocks(*norm_of, spec), counts, *given)
        made = Quantized(codes, scales.reshape(cast.shape[0], -1))
    elif scale is not None:
        multiplier = scale.astype(jnp.float32).reshape(1)
        codes, *rest = call_on_axes(Scaled(*norm_of, spec), counts, *given, multiplier)
        codes_t = rest.pop(0) if spec.columnwise else None
        inverse, amax, *statistics = rest
        made = Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax)
    else:
        amax, y, *statistics = call_on_axes(Measured(*norm_of), counts, *given)
        made = FORMATS[spec.format.name].plan(cast)(y, Given(amax=amax))
    shape = (*x.shape[:-1], 1)
    mean = statistics[0].reshape(shape) if how.centered else None
    return made, mean, statistics[-1].reshape(shape)


BACKEND = Backend[NormCodesRequest]("triton", refuses=refuses, bind=bind)
