"""Products of FP8 codes with block scales by the kernel of common/kernels/block_product.py, on Hopper."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common import optional
from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D
from ..launching import refuses_on
from ..operand import Operand
from .codes_product import idle, multiplied, unfit
from .request import GemmRequest
from .triton import RESULTS

_FORMATS = ((BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D))
_LANGUAGE = "triton.experimental.gluon.language.nvidia.hopper"
_VERSIONS = ("3.6", "3.7")  # of Triton, whose Gluon is an experiment and changes between them


def refuses(request: GemmRequest) -> str | None:
    if (reason := refuses_on(request.platform, "GemmPrimitive")) is not None:
        return reason
    if request.capability != 90:
        return f"compute capability {request.capability / 10} != 9.0: it is written in instructions of Hopper"
    if (request.a_format, request.b_format) not in _FORMATS:
        return "it takes 1x128 blocks times 128x128 or 1x128 blocks"
    if 0 in (request.m, request.n, request.k):
        return "a product without elements"
    if (reason := unfit(request.m, request.n, request.k) or idle(request.m, request.n)) is not None:
        return reason
    if request.dtype not in RESULTS:
        return f"a result in {request.dtype}; it writes bfloat16, float16 and float32"
    return _missing()


def _missing() -> str | None:
    """Why Gluon cannot be used; asked last, for it imports triton."""
    if (reason := optional.failure(_LANGUAGE, "warpgroup_mma", "tma", "mbarrier")) is not None:
        return reason
    from triton import __version__, knobs

    if not __version__.startswith(_VERSIONS):
        return f"triton {__version__}; the Gluon of {' and '.join(_VERSIONS)} is known"
    return "TRITON_INTERPRET=1: Gluon has no interpreter" if knobs.runtime.interpret else None


def run(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """One function for all requests: what is jitted around it is traced once for those that are alike."""
    return multiplied(a, b, dtype, exact, by_groups=True)


BACKEND = Backend[GemmRequest]("gluon", refuses=refuses, bind=lambda request: run)
