"""FP8 products with one scale a tensor on NVIDIA GPUs, in the two forms that XLA hands to cuBLASLt.

scaled   dot(codes * scale, codes * scale) in bfloat16: one library call, scales inside, where XLA's own Triton
         products are off; where they are on, XLA computes it in bfloat16 without a word
direct   dot(codes, codes) * scales: the scales come after it; without the flag each shape takes long to compile
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..custom_calls import switched_off
from ..kernels import Kernel
from ..operand import Operand
from ..several_axes import OverVmap, call_on_axes
from .flag import FLAG, is_triton_off, warn_of_the_flag
from .request import GemmRequest

_LAST_AXES = (((1,), (1,)), ((), ()))


def bind_direct(request: GemmRequest) -> Callable[..., Array]:
    warn_of_the_flag(request)
    return run_direct


def _refuses(request: GemmRequest) -> str | None:
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := switched_off("GemmPrimitive")) is not None:
        return reason
    if request.capability < 89:
        return f"compute capability {request.capability / 10} < 8.9"
    for form in (request.a_format, request.b_format):
        if form is None:
            return "an operand is not quantized"
        if form != FLOAT8:
            return f"block scales ({form.name}); it takes one scale a tensor"
    if request.a_element == request.b_element == jnp.float8_e5m2:
        return "both operands are E5M2; cuBLASLt takes at most one"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    for name in ("m", "n", "k"):
        if getattr(request, name) % 16:
            return f"{name.upper()}={getattr(request, name)} is not a multiple of 16"
    return None


def refuses_scaled(request: GemmRequest) -> str | None:
    if (reason := _refuses(request)) is not None:
        return reason
    if not is_triton_off():
        return f"XLA would compute it in bfloat16; set XLA_FLAGS=--{FLAG}=false before jax starts"
    if request.dtype != jnp.bfloat16:
        return f"a result in {request.dtype}; it makes bfloat16"
    return None


@dataclass(frozen=True)
class Product(Kernel):
    """(codes a [M, K], codes b [N, K], scale of a [1], scale of b [1]) -> out [M, N]

    A kernel for the partitioner's sake alone: codes are what devices exchange, where it would have them exchange the
    values that a product dequantizes; and every device's part is a product of matrices, as XLA knows it by.
    direct   are scales applied to the sums?
    """

    dtype: jnp.dtype
    exact: bool
    direct: bool
    led_by_results = True
    summed = (0,)

    @property
    def rule(self) -> str:
        return "m k, n k, p, q -> m n"

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        a, b, *_ = operands
        return (jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), self.dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        (a, b), (scale_a, scale_b) = map(_row_by_row, arrays[:2]), arrays[2:]
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        dot = functools.partial(lax.dot_general, dimension_numbers=_LAST_AXES, precision=precision)
        if self.direct:
            # Without preferred_element_type the result would be FP8.
            sums = dot(a, b, preferred_element_type=jnp.float32)
            return ((sums * (scale_a * scale_b)).astype(self.dtype),)
        # XLA takes a scalar's conversion to dtype and back to float32 away, and cuBLASLt reads the float32 one. Without
        # the barrier the reshape of an array [1] would move between the two, and the scale be rounded to bfloat16. Both
        # pass one barrier, which belongs to this product: products that share an operand would else share its
        # dequantized values, and XLA would make one product of them, in bfloat16.
        scales = lax.optimization_barrier((scale_a.reshape(()), scale_b.reshape(())))
        values = (
            codes.astype(self.dtype) * scale.astype(self.dtype)
            for codes, scale in zip((a, b), scales, strict=True)
        )
        return (dot(*values, preferred_element_type=self.dtype),)

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,)


def run_scaled(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    return _run(Product(dtype, exact, False), a, b)


def run_direct(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    return _run(Product(dtype, exact, True), a, b)


def _run(product: Product, a: Operand, b: Operand) -> Array:
    assert a.scale is not None and b.scale is not None
    counts = {"m": a.axis, "n": b.axis, "k": a.codes.ndim - a.axis}
    return call_on_axes(product, counts, a.codes, b.codes, a.scale.reshape(1), b.scale.reshape(1))[0]


def _row_by_row(codes: Array) -> Array:
    """The codes [rows, K] as cuBLASLt wants them in memory, before anything is made of them.

    XLA would lay codes that devices exchange along K column by column, and turn them there and back; and of square
    matrices that share a scale it would turn one between its two conversions, where it knows no FP8 product.
    """
    return with_layout_constraint(codes, Layout((0, 1)))


SCALED = Backend[GemmRequest]("scaled", refuses=refuses_scaled, bind=lambda request: run_scaled)
DIRECT = Backend[GemmRequest]("direct", refuses=_refuses, bind=bind_direct)
