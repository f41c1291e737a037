"""Library, flag and device queries, and dtype conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...common.checks import described, member
from ...common.enums import DType
from ...common.numbers import with_article
from ..runtime.checks import check_dtype
from ..runtime.platform import compute_capability, library_version, xla_flag

__all__ = [
    "get_cudnn_version",
    "get_min_device_compute_capability",
    "get_xla_flag",
    "jax_dtype_to_te_dtype",
    "te_dtype_to_jax_dtype",
]

_DTYPES: dict[DType, Any] = {
    DType.kByte: jnp.dtype(jnp.uint8),
    DType.kInt32: jnp.dtype(jnp.int32),
    DType.kInt64: jnp.dtype(jnp.int64),
    DType.kFloat32: jnp.dtype(jnp.float32),
    DType.kFloat16: jnp.dtype(jnp.float16),
    DType.kBFloat16: jnp.dtype(jnp.bfloat16),
    DType.kFloat8E4M3: jnp.dtype(jnp.float8_e4m3fn),
    DType.kFloat8E5M2: jnp.dtype(jnp.float8_e5m2),
    DType.kFloat8E8M0: jnp.dtype(jnp.float8_e8m0fnu),
    DType.kFloat4E2M1: jnp.dtype(jnp.float4_e2m1fn),
}


def te_dtype_to_jax_dtype(te_dtype: DType) -> Any:
    """JAX dtype for a DType member."""
    member("te_dtype", te_dtype, DType)
    return _DTYPES[te_dtype]


def jax_dtype_to_te_dtype(jax_dtype: Any) -> DType:
    """DType member for a JAX dtype.

    Raises:
        ValueError: DType has no member for the dtype.
    """
    expected = check_dtype("jax_dtype", jax_dtype)
    for member_of_te, dtype in _DTYPES.items():
        if dtype == expected:
            return member_of_te
    names = ", ".join(dtype.name for dtype in _DTYPES.values())
    raise ValueError(f"jax_dtype={expected.name} has no member of DType; choose one of {names}")


def get_xla_flag(flag: str, default: Any = None, cast: Callable[[str], Any] | None = None) -> Any:
    """Get a flag in XLA_FLAGS as a Python value: a bool, an int or a float where it is one.

    Args:
        flag: Flag name, with or without its leading dashes.
        default: Returned if the flag is not set.
        cast: Converts the text of the value instead.

    Raises:
        TypeError: flag is not a string.
    """
    if not isinstance(flag, str):
        raise TypeError(
            f"flag={described(flag)} is {with_article(type(flag))}; pass the name of a flag of XLA"
        )
    value = xla_flag(flag.lstrip("-"))
    if value is None:
        return default
    if cast is not None:
        return cast(value)
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def get_cudnn_version() -> tuple[int, int, int]:
    """Version (major, minor, patch) of the cuDNN library that XLA uses; zeros without a GPU."""
    number = library_version("cudnn")
    return number // 10000, number // 100 % 100, number % 100


def get_min_device_compute_capability() -> int:
    """Ten times the lowest compute capability among this process's GPUs; 90 on a CPU."""
    return compute_capability()
