"""Products of FP8 codes by the kernels of common/kernels/grouped_gemm.py, as one group of rows.

What XLA has no form for: a scale a block. And what it takes long to compile: one scale a tensor without its flag.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ..launching import refuses_on
from .codes_product import multiplied
from .flag import is_triton_off, warn_of_the_flag
from .request import GemmRequest

RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_FORMATS = ((FLOAT8, FLOAT8), (BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D))


def refuses(request: GemmRequest) -> str | None:
    if (reason := refuses_on(request.platform, "GemmPrimitive")) is not None:
        return reason
    if request.capability < 89:
        return f"compute capability {request.capability / 10} < 8.9 has no FP8 tensor cores"
    formats = (request.a_format, request.b_format)
    if None in formats:
        return "an operand is not quantized"
    if formats not in _FORMATS:
        return "it takes one scale a tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    if formats == (FLOAT8, FLOAT8) and is_triton_off():
        return "one scale a tensor, which XLA hands to cuBLASLt"
    if request.n % 16 or request.k % 16:
        return f"N={request.n} or K={request.k} is not a multiple of 16"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    if request.dtype not in RESULTS:
        return f"a result in {request.dtype}; it writes bfloat16, float16 and float32"
    return None


def bind(request: GemmRequest) -> Callable[..., Array]:
    if request.a_format == FLOAT8:
        warn_of_the_flag(request)
    return multiplied


BACKEND = Backend[GemmRequest]("triton", refuses=refuses, bind=bind)
