"""Norms and their codes in one kernel from common/kernels/norm.py, which holds full rows of x [rows, width].

With a given multiplier, with a scale per 1 x 128 row block, or, in a second pass, with the maximum that the kernel
finds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, ceil_div
from ...runtime.platform import processors
from ..kernels import Kernel
from ..launching import perform, run
from ..norm import triton as norm
from ..partitioning import ShardingRule
from ..quantize import FORMATS, Quantized, QuantizeRequest, QuantizeSpec, jax_dtype
from ..quantize import triton as quantization
from ..quantize.spec import QuantizeInputs
from ..several_axes import call_on_axes, with_rows
from .separate import CodedNorm, NormCodesRequest

if TYPE_CHECKING:
    from ....common.kernels.norm import NormRows

# Column limit for a LayerNorm that writes codes with block scales; wider ones need too many registers.
_WIDEST_CENTERED = 4096
_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)


def unsupported_reason(request: NormCodesRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    reason = norm.unsupported_reason(request.norm) or quantization.unsupported_in_producer(
        request.cast
    )
    if reason is not None:
        return reason
    spec = request.cast.spec
    if not spec.format.block:
        return None
    if spec.format != BLOCK_1D or spec.columnwise:
        return "blocks that span rows; the kernel that makes y holds single rows"
    if request.centered and request.norm.width > _WIDEST_CENTERED:
        return f"blocks of a LayerNorm of {request.norm.width} columns; it makes them up to {_WIDEST_CENTERED}"
    return None


@dataclass(frozen=True)
class _CodedNormKernel(Kernel):
    """Base class for kernels that normalize x [rows, width] and quantize the result.

    Operands begin with x, gamma and, if centered, beta. Results end with the statistics: the mean [rows] if centered,
    and rstdev [rows].
    """

    centered: bool
    zero_centered: bool
    epsilon: float

    def sharing(self, parameters: str, outputs: list[str], **options: Any) -> ShardingRule:
        """Build the sharding rule of a kernel.

        Args:
            parameters: Axes for the operands after beta, preceded by ", "; or "".
            outputs: Axes for the results before the statistics.
            **options: Options for the rule.
        """
        operands, statistics = ("r w, w, w", ["r", "r"]) if self.centered else ("r w, w", ["r"])
        return ShardingRule(
            f"{operands}{parameters} -> {', '.join([*outputs, *statistics])}", **options
        )

    def with_statistics(
        self, x: Any, *made: jax.ShapeDtypeStruct
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Result shapes followed by the statistics' shapes."""
        statistic = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        return (*made, *[statistic] * (1 + self.centered))

    def rows(self, x: Array) -> NormRows:
        """The norm in the form that the kernels take."""
        from ....common.kernels.norm import NormRows

        rows, width = x.shape
        norms = (self.epsilon, self.zero_centered, self.centered)
        gpu = processors()
        return NormRows(rows, width, width, x.dtype.name, *norms, gpu.count, gpu.shared_memory)


@dataclass(frozen=True)
class ScaledNormCodes(_CodedNormKernel):
    """Normalize and quantize with a given multiplier [1], the last operand.

    Results: codes, codes_t if requested, scale [1], max|y| [1] and the statistics.
    """

    spec: QuantizeSpec

    @property
    def rule(self) -> ShardingRule:
        codes = ["r w", "w r"] if self.spec.columnwise else ["r w"]
        return self.sharing(", s", [*codes, "i", "o"], replicated=("w",), maxed=(len(codes) + 1,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x, dtype = operands[0], jax_dtype(self.spec.element)
        shapes = [x.shape, x.shape[::-1]] if self.spec.columnwise else [x.shape]
        codes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return self.with_statistics(x, *codes, _ONE, _ONE)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm_codes

        x, gamma, *beta, multiplier = arrays
        program = norm_codes.one_scale(self.rows(x), quantization.one_scale(self.spec))
        inputs = [x, gamma, beta[0] if beta else None, multiplier, None]
        codes, scale, codes_t, _, amax, *statistics = perform(program, inputs)
        return tuple(
            result for result in (codes, codes_t, scale, amax, *statistics) if result is not None
        )


@dataclass(frozen=True)
class MeasuredNorm(_CodedNormKernel):
    """Normalize, and compute the absolute maximum: max|y| [1], y and the statistics."""

    @property
    def rule(self) -> ShardingRule:
        return self.sharing("", ["o", "r w"], replicated=("w",), maxed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        return self.with_statistics(x, _ONE, jax.ShapeDtypeStruct(x.shape, x.dtype))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm

        x, gamma, *beta = arrays
        results = run(
            norm.forward(self.rows(x), measures=True), [x, gamma, beta[0] if beta else None, None]
        )
        return tuple(array for array in results if array is not None)


@dataclass(frozen=True)
class BlockNormCodes(_CodedNormKernel):
    """Normalize and quantize in 1 x 128 blocks: codes, scales [rows, ceil(width / 128)] and the statistics."""

    spec: QuantizeSpec

    @property
    def rule(self) -> ShardingRule:
        return self.sharing("", ["r w", "r b"], replicated=("w", "b"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        codes = jax.ShapeDtypeStruct(x.shape, jax_dtype(self.spec.element))
        scales = jax.ShapeDtypeStruct((x.shape[0], ceil_div(x.shape[1], 128)), jnp.float32)
        return self.with_statistics(x, codes, scales)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import norm_codes

        x, gamma, *beta = arrays
        program = norm_codes.row_blocks(self.rows(x), quantization.blocks(self.spec, x.dtype))
        results = perform(program, [x, gamma, beta[0] if beta else None])
        return tuple(array for array in results if array is not None)


def run_codes(
    x: Array,
    gamma: Array,
    beta: Array | None,
    scale: Array | None,
    coded: CodedNorm,
    cast: QuantizeRequest,
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    options, spec = (coded.centered, coded.zero_centered, coded.epsilon), coded.spec
    of_rows, count = with_rows(x, 1)
    operands = [of_rows, gamma, *([] if beta is None else [beta])]
    counts = {"r": count}
    if spec.format.block:
        codes, scales, *statistics = call_on_axes(BlockNormCodes(*options, spec), counts, *operands)
        quantized = Quantized(codes, scales.reshape(cast.shape[0], -1))
    elif scale is not None:
        multiplier = scale.astype(jnp.float32).reshape(1)
        codes, *rest = call_on_axes(ScaledNormCodes(*options, spec), counts, *operands, multiplier)
        codes_t = rest.pop(0) if spec.columnwise else None
        inverse, amax, *statistics = rest
        quantized = Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax)
    else:
        amax, y, *statistics = call_on_axes(MeasuredNorm(*options), counts, *operands)
        quantized = FORMATS[spec.format.name].quantize_by_kernels(
            y, QuantizeInputs(amax=amax), cast
        )
    shape = (*x.shape[:-1], 1)
    mean = statistics[0].reshape(shape) if coded.centered else None
    return quantized, mean, statistics[-1].reshape(shape)


BACKEND = Backend[NormCodesRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: functools.partial(run_codes, cast=request.cast),
)
