"""The flag of XLA that decides how it computes FP8 products, and the one warning about it."""

from __future__ import annotations

import functools
import warnings

import jax.numpy as jnp

from ...platform import has_gpu, xla_flag
from .request import GemmRequest

FLAG = "xla_gpu_enable_triton_gemm"


def is_triton_off() -> bool:
    """Does XLA leave products to libraries, as FP8 in cuBLASLt needs it?"""
    return xla_flag(FLAG) in ("false", "0")


def warn_of_the_flag(request: GemmRequest) -> None:
    """Once a process, on a GPU, of a product that the flag would make faster."""
    if has_gpu() and request.dtype == jnp.bfloat16 and not is_triton_off():
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"set XLA_FLAGS=--{FLAG}=false before jax starts: without it FP8 products with one scale a tensor do not reach "
        "cuBLASLt, and those that XLA computes itself take about 30 s a shape to compile",
        stacklevel=2,
    )
