"""FP8 products with one scale per tensor on NVIDIA GPUs, in the two forms that XLA passes to cuBLASLt.

scaled: dot(codes * scale, codes * scale) in bfloat16, one library call that applies the scales, if XLA's own Triton
products are disabled. If they are enabled, XLA computes it in bfloat16 without a warning.

direct: dot(codes, codes) * scales, with the scales applied to the sums. Without the flag each shape takes long to
compile.

`run_widened` is the direct form with codes in bfloat16, for GPUs without FP8 tensor cores; see `decoded`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ...runtime.platform import has_gpu, xla_flag
from ..launching import disabled_reason
from ..operand import Operand
from ..partitioning import ShardingRule
from ..several_axes import OperationsKernel, call_on_axes
from .request import GemmRequest

FLAG = "xla_gpu_enable_triton_gemm"
_LAST_AXES = (((1,), (1,)), ((), ()))


def is_triton_off() -> bool:
    """Whether XLA leaves products to libraries, which FP8 products in cuBLASLt require."""
    return xla_flag(FLAG) in ("false", "0")


def warn_of_the_flag(request: GemmRequest) -> None:
    """Warn once per process, on a GPU, about a product that the flag would make faster."""
    if has_gpu() and request.dtype == jnp.bfloat16 and not is_triton_off():
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"set XLA_FLAGS=--{FLAG}=false before jax starts: without it FP8 products with one scale per tensor do not "
        "reach cuBLASLt, and XLA's own products take about 30 s per shape to compile",
        stacklevel=2,
    )


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := disabled_reason("GemmPrimitive")) is not None:
        return reason
    if (reason := request.hardware.lacks("fp8 products")) is not None:
        return reason
    for form in (request.a_format, request.b_format):
        if form is None:
            return "an operand is not quantized"
        if form != FLOAT8:
            return f"block scales ({form.name}); supported: one scale per tensor"
    if request.a_element == request.b_element == jnp.float8_e5m2:
        return "both operands are E5M2; cuBLASLt takes at most one"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    for name in ("m", "n", "k"):
        if getattr(request, name) % 16:
            return f"{name.upper()}={getattr(request, name)} is not a multiple of 16"
    return None


def scaled_unsupported_reason(request: GemmRequest) -> str | None:
    if (reason := unsupported_reason(request)) is not None:
        return reason
    if not is_triton_off():
        return f"XLA would compute it in bfloat16; set XLA_FLAGS=--{FLAG}=false before jax starts"
    if request.dtype != jnp.bfloat16:
        return f"a result in {request.dtype}; it makes bfloat16"
    return None


@dataclass(frozen=True)
class Float8Product(OperationsKernel):
    """Multiply FP8 codes with one scale per matrix: out [M, N] = a [M, K] @ b [N, K].T.

    Operands: codes of a and b, scales [1] of a and b.

    Devices exchange codes instead of dequantized values, and every device's part is a matrix product, the form that XLA
    recognizes.

    Attributes:
        dtype: dtype of the product.
        exact: Whether partial sums are promoted to float32.
        direct: Whether the scales are applied to the sums.
        widens: Whether the factors of the direct form are bfloat16.
    """

    dtype: jnp.dtype
    exact: bool
    direct: bool
    widens: bool = False

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule("m k, n k, p, q -> m n", led_by_results=True, summed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, *_ = operands
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        # Codes [rows, K] are row-major, as cuBLASLt reads them. XLA would choose column-major codes where devices
        # exchange them along K, and transpose them twice. Of square matrices that share a scale it would transpose one
        # between its two conversions, where it recognizes no FP8 product.
        (a, b), (scale_a, scale_b) = (
            [with_layout_constraint(codes, Layout((0, 1))) for codes in arrays[:2]],
            arrays[2:],
        )
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        dot = functools.partial(lax.dot_general, dimension_numbers=_LAST_AXES, precision=precision)
        if self.direct:
            if self.widens:
                a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
            # Without preferred_element_type the result would be FP8.
            sums = dot(a, b, preferred_element_type=jnp.float32)
            return ((sums * (scale_a * scale_b)).astype(self.dtype),)
        # XLA removes the conversion of a scalar to dtype and back to float32, and cuBLASLt reads the float32 scalar.
        # Without the barrier the reshape of an array [1] would move between the two conversions, and the scale would be
        # rounded to bfloat16. Both scales pass one barrier, which belongs to this product: products that share an
        # operand would otherwise share its dequantized values, and XLA would merge the products, in bfloat16.
        scales = lax.optimization_barrier((scale_a.reshape(()), scale_b.reshape(())))
        values = (
            codes.astype(self.dtype) * scale.astype(self.dtype)
            for codes, scale in zip((a, b), scales, strict=True)
        )
        return (dot(*values, preferred_element_type=self.dtype),)


def run(
    a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, direct: bool, widens: bool = False
) -> Array:
    """Compute the product a @ b.T; see `Float8Product`."""
    assert a.scale is not None and b.scale is not None
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    scales = a.scale.reshape(1), b.scale.reshape(1)
    return call_on_axes(
        Float8Product(dtype, exact, direct, widens), counts, a.codes, b.codes, *scales
    )[0]


# One object per form: equal functions are traced once.
run_scaled = functools.partial(run, direct=False)
run_direct = functools.partial(run, direct=True)
run_widened = functools.partial(run, direct=True, widens=True)


def bind_direct(request: GemmRequest) -> Callable[..., Array]:
    warn_of_the_flag(request)
    return run_direct


SCALED = Backend[GemmRequest](
    "scaled", unsupported_reason=scaled_unsupported_reason, bind=lambda request: run_scaled
)
DIRECT = Backend[GemmRequest]("direct", unsupported_reason=unsupported_reason, bind=bind_direct)
