"""Code products that no tensor core supports: every device decodes its part of the codes.

widen: the values are multiplied in bfloat16, which represents FP8 codes, and MXFP8 and NVFP4 codes times their block
scales. Per-tensor scales, and NVFP4's second level, are applied to the float32 sum.

decoded: the reference computation, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..kernels import Kernel
from ..launching import disabled_reason
from ..operand import Operand
from ..several_axes import OverVmap
from . import block_scales, float8, reference
from .block_scales import BlockScaledProduct
from .request import GemmRequest


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    return _platform_failure(request.platform) or block_scales.unsupported_reason(request)


def _platform_failure(platform: str) -> str | None:
    if platform != "cuda":
        return f"it needs a CUDA device, the program is for {platform}"
    return disabled_reason("GemmPrimitive")


def widen_unsupported_reason(request: GemmRequest) -> str | None:
    reason = _platform_failure(request.platform) or request.hardware.lacks("bf16 products")
    if reason is not None:
        return reason
    if not _one_scale(request) and (reason := block_scales.unsupported_reason(request)) is not None:
        return reason
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    for form in (request.a_format, request.b_format):
        if form is not None and not form.fits_bfloat16:
            return f"{form.name} scales may be any float32; their product with a code needs more bits than bfloat16 has"
    return None


def _one_scale(request: GemmRequest) -> bool:
    return request.a_format == request.b_format == FLOAT8


@dataclass(frozen=True)
class DecodedProduct(BlockScaledProduct):
    """A product from decoded values.

    Attributes:
        widens: Whether the values are bfloat16; otherwise float32.
    """

    widens: bool = False

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,)

    def product(self, a: Operand, b: Operand) -> Array:
        a, b = (block_scales.with_scale_dtypes(operand) for operand in (a, b))
        return reference.run(a, b, self.dtype, True, self.widens)


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, widens: bool) -> Array:
    """Compute a [*M, *K] @ b [*N, *K].T in dtype, with partial sums in float32 even if exact is False."""
    return block_scales.multiply_codes(DecodedProduct, a, b, dtype, widens=widens)


# One object per form: equal functions are traced once.
_RUN_WIDENED = functools.partial(run, widens=True)
_RUN_DECODED = functools.partial(run, widens=False)
WIDEN = Backend[GemmRequest](
    "widen",
    unsupported_reason=widen_unsupported_reason,
    bind=lambda request: float8.run_widened if _one_scale(request) else _RUN_WIDENED,
)
BACKEND = Backend[GemmRequest](
    "decoded", unsupported_reason=unsupported_reason, bind=lambda request: _RUN_DECODED
)
