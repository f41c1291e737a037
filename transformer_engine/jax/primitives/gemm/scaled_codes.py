"""Code products with block scales by matrix instructions that read the scales, and with other blocks by Triton.

dot_scaled: the kernels in `scaled_product.py` and `promoted_product.py` in common/kernels. MXFP8 and NVFP4 codes run on
GPUs whose tensor cores read their scales, codes with float32 scales per 128 elements on every GPU with FP8 tensor
cores, in any pair and extent.

scaled_matmul: XLA's operation behind `jax.nn.scaled_matmul`, which it hands to cuDNN. XLA dequantizes what it
cannot hand over, without a message. The Triton kernels, whose instructions are known, are therefore preferred. The
operation is called directly: the function of JAX partitions its operands itself, which it cannot do within a
primitive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from ....common import optional
from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, SWIZZLED_NAMES, TensorFormat
from ....common.kernels import launch
from ...runtime.platform import hardware
from ..launching import disabled_reason, platform_failure, run
from ..operand import Operand
from ..quantize import unpack_e2m1
from . import block_scales, reference
from .block_scales import BlockScaledProduct
from .request import GemmRequest

if TYPE_CHECKING:
    from ....common.kernels.product_parts import Side, TmaOptions

_RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_XLA_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ELEMENTS = {
    jnp.dtype(jnp.float8_e4m3fn): "e4m3",
    jnp.dtype(jnp.float8_e5m2): "e5m2",
    jnp.dtype(jnp.uint8): "e2m1",
}


@dataclass(frozen=True)
class DotScaledProduct(BlockScaledProduct):
    """A product by the kernels in common/kernels, which swizzle one-byte scales first."""

    packs = True

    def product(self, a: Operand, b: Operand) -> Array:
        from ....common.kernels import promoted_product, scaled_product
        from ....common.kernels.product_parts import is_swapped

        assert (
            a.format is not None
            and b.format is not None
            and a.scale is not None
            and b.scale is not None
        )
        depth, dtype = a.codes.shape[1] * a.format.packing, self.dtype.name
        sides, rows = [_side(operand) for operand in (a, b)], (a.codes.shape[0], b.codes.shape[0])
        scales, units = (a.scale, b.scale), (a.format.unit_amax, b.format.unit_amax)
        levels = (None, None)
        if not a.format.swizzled:
            launch = promoted_product.block_product(*sides, depth, rows[1], dtype)
        else:
            assert a.format.block is not None
            scales = tuple(map(_swizzle, scales))
            factor = 1.0
            if units[0] is not None and units[1] is not None:
                levels, factor = (a.amax, b.amax), 1.0 / (units[0] * units[1])
            launch = scaled_product.product(
                *sides,
                depth,
                rows[1],
                dtype,
                length=a.format.block[1],
                packing=a.format.packing,
                factor=factor,
                tma=_tma_options(a.codes.shape[1], rows[1] * self.dtype.itemsize),
            )
        order = slice(None, None, -1) if is_swapped(*rows) else slice(None)
        inputs = [*(a.codes, b.codes)[order], *scales[order]]
        inputs += [*levels[order], None, None] if a.format.swizzled else [None, None]
        out, _ = run(launch, inputs)
        assert out is not None
        return out


def _tma_options(pitch: int, result_pitch: int) -> TmaOptions:
    """Tensors that TMA moves, by their row bytes; all arrays are aligned to 16 bytes."""
    from ....common.kernels.product_parts import TmaOptions

    engine = hardware().has("tensor memory")
    return TmaOptions(
        *(engine and size > 0 and size % launch.ALIGNMENT == 0 for size in (pitch, result_pitch))
    )


def _side(operand: Operand) -> Side:
    """Describe a contiguous operand as `product_parts.Side`."""
    from ....common.kernels.product_parts import Side

    assert operand.format is not None and operand.scale is not None
    rows, width = operand.codes.shape
    levels = 0 if operand.amax is None else operand.amax.size
    unit, strides = 0, (0, 0)
    if not operand.format.swizzled:
        unit, strides = 1 if operand.format == BLOCK_1D else 128, (operand.scale.shape[1], 1)
    return Side(rows, width, _ELEMENTS[jnp.dtype(operand.codes.dtype)], levels, unit, strides)


def _swizzle(scale: Array) -> Array:
    """Swizzle one-byte scales uint8 [R, C]; see `swizzled_scales.swizzle`."""
    from ....common.kernels.swizzled_scales import swizzle

    rows, columns = scale.shape
    (result,) = run(swizzle(rows, columns, (columns, 1)), [scale])
    assert result is not None
    return result


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (reason := platform_failure(request.platform, "GemmPrimitive")) is not None:
        return reason
    if (reason := _unsupported_pair(request)) is not None:
        return reason
    if request.swizzled:
        reason = optional.scaled_dot_problem(request.hardware, optional.release("triton"))
        if reason is not None:
            return reason
    if request.dtype not in _RESULTS:
        return f"a result in {request.dtype}; supported: bfloat16, float16 and float32"
    return None


def _unsupported_pair(request: GemmRequest) -> str | None:
    """Reason why the tensor cores do not multiply two operands with these block scales, or None."""
    if (reason := block_scales.unsupported_reason(request)) is not None:
        return reason
    if (needs := request.block_products) is None:
        return f"it takes two operands of 1x128 or 128x128 blocks, {SWIZZLED_NAMES}"
    if (reason := request.hardware.lacks(needs)) is not None:
        return reason
    form = request.a_format
    if form is not None and request.k % form.packing:
        return f"K={request.k} codes do not fill whole bytes"
    return None


def run_dot_scaled(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """Compute a [*M, *K] @ b [*N, *K].T in dtype, with partial sums in float32 even if exact is False."""
    return block_scales.multiply_codes(DotScaledProduct, a, b, dtype)


@dataclass(frozen=True)
class ScaledMatmulProduct(BlockScaledProduct):
    """A product by XLA's scaled operation; the second level of NVFP4 is applied to its float32 result."""

    packs = True

    def product(self, a: Operand, b: Operand) -> Array:
        a, b = (_with_codes(block_scales.with_scale_dtypes(operand)) for operand in (a, b))
        assert a.scale is not None and b.scale is not None
        dtype = self.dtype if a.amax is None else jnp.dtype(jnp.float32)
        result = jax.ShapeDtypeStruct((1, a.codes.shape[0], b.codes.shape[0]), dtype)
        settings = {
            "lhs_batch_dimensions": [0],
            "rhs_batch_dimensions": [0],
            "dequantize_type": _XLA_NAMES[dtype.name],
        }
        call = jax.ffi.ffi_call(
            "__op$block_scaled_dot",
            result,
            vmap_method="sequential",
            custom_call_api_version=2,
            legacy_backend_config=json.dumps({"scaled_dot_backend_config": settings}),
        )
        out = call(*(x[None] for x in (a.codes, b.codes, a.scale, b.scale)))[0]
        return out if a.amax is None else reference.with_second_level(out, a, b).astype(self.dtype)


def _with_codes(operand: Operand) -> Operand:
    """Convert an operand's packed codes to float4_e2m1fn."""
    assert operand.format is not None
    packed = operand.format.packing == 2
    return replace(operand, codes=unpack_e2m1(operand.codes)) if packed else operand


def matmul_unsupported_reason(request: GemmRequest) -> str | None:
    """Return why XLA's scaled_matmul does not support the request, or None."""
    if request.platform != "cuda":
        return f"it needs a CUDA device, the program is for {request.platform}"
    if (reason := disabled_reason("GemmPrimitive") or _unsupported_pair(request)) is not None:
        return reason
    if not request.swizzled:
        return f"it takes two operands of {SWIZZLED_NAMES}"
    if request.a_element == request.b_element == jnp.float8_e5m2:
        return "both operands are E5M2; XLA dequantizes them"
    length = _length(request.a_format)
    if request.k % length or request.m % 16 or request.n % 16:
        return (
            f"M={request.m} or N={request.n} is not a multiple of 16, or K={request.k} of {length}"
        )
    if request.dtype not in _RESULTS:
        return f"a result in {request.dtype}; supported: bfloat16, float16 and float32"
    return optional.failure("jax.nn", "scaled_matmul")  # which XLA's operation came with


def _length(form: TensorFormat | None) -> int:
    """Number of elements that share a scale."""
    assert form is not None and form.block is not None
    return form.block[1]


def run_scaled_matmul(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool) -> Array:
    """Compute a [*M, *K] @ b [*N, *K].T in dtype; see `ScaledMatmulProduct`."""
    return block_scales.multiply_codes(ScaledMatmulProduct, a, b, dtype)


DOT_SCALED = Backend[GemmRequest](
    "dot_scaled", unsupported_reason=unsupported_reason, bind=lambda request: run_dot_scaled
)
SCALED_MATMUL = Backend[GemmRequest](
    "scaled_matmul",
    unsupported_reason=matmul_unsupported_reason,
    bind=lambda request: run_scaled_matmul,
)
