"""FP8 products with one scale a tensor on NVIDIA GPUs, in the two forms that XLA hands to cuBLASLt.

scaled   dot(codes * scale, codes * scale) in bfloat16: one library call, scales inside, where XLA's own Triton
         products are off; where they are on, XLA computes it in bfloat16 without a word
direct   dot(codes, codes) * scales: the scales come after it; without the flag each shape takes long to compile
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..custom_calls import switched_off
from ..operand import Operand
from .flag import FLAG, is_triton_off, warn_of_the_flag
from .reference import LAST_AXES
from .request import GemmRequest


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


def run_scaled(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    assert a.scale is not None and b.scale is not None
    # XLA takes a scalar's conversion to dtype and back to float32 away, and cuBLASLt reads the float32 scale. Without
    # the barrier the reshape of an array [1] would move between the two, and the scale be one rounded to bfloat16.
    # Both scales pass one barrier, which belongs to this product: products that share an operand would else share its
    # dequantized values, and XLA would make one product of them, in bfloat16.
    scales = lax.optimization_barrier((a.scale.reshape(()), b.scale.reshape(())))
    return lax.dot_general(
        a.codes.astype(dtype) * scales[0].astype(dtype),
        b.codes.astype(dtype) * scales[1].astype(dtype),
        LAST_AXES,
        precision=_precision(exact),
        preferred_element_type=dtype,
    )


def run_direct(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    assert a.scale is not None and b.scale is not None
    # Without preferred_element_type the result would be FP8.
    product = lax.dot_general(
        a.codes, b.codes, LAST_AXES, precision=_precision(exact), preferred_element_type=jnp.float32
    )
    return (product * (a.scale * b.scale)).astype(dtype)


def _precision(exact: bool) -> lax.Precision:
    return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


SCALED = Backend[GemmRequest]("scaled", refuses=refuses_scaled, bind=lambda request: run_scaled)
DIRECT = Backend[GemmRequest]("direct", refuses=_refuses, bind=bind_direct)
