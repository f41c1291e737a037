"""Products of block-scaled codes by the Triton kernels in `scaled_product.py` and `promoted_product.py`.

FP8 codes with 1x128 and 128x128 blocks run on every GPU with FP8 tensor cores; MXFP8 and NVFP4 codes on GPUs whose
tensor cores read their scales, where blocks with power-of-two scales are multiplied by the same instruction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ....common import optional
from ....common.dispatch import Backend, requirements
from ....common.formats import BLOCK_FORMATS, SWIZZLED_NAMES
from ....common.kernels import launch
from ...runtime.device import is_current_device
from ...runtime.launching import rows_dense
from ..operand import Operand
from .block_scales import has_row_blocks
from .request import EPILOGUES, Epilogue, GemmRequest
from .swizzle import swizzle_operand_scale

if TYPE_CHECKING:
    from ....common.kernels.product_parts import ProductEpilogue, TmaOptions

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}


class Activation(NamedTuple):
    """The activation in a product's epilogue.

    Attributes:
        name: "", "gelu" or "gelu_gradient".
        x: GELU input [M, N] whose derivative multiplies the product, laid out like the result.
        kept: Buffer [M, N] for the input of GELU, laid out like the result.
    """

    name: str = ""
    x: Tensor | None = None
    kept: Tensor | None = None


NO_ACTIVATION = Activation()


def unsupported_reason(request: GemmRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    reason = request.unsupported_on_gpu or launch.unavailable_reason(request.hardware)
    if reason is not None:
        return reason
    needs = request.block_products
    if needs is None:
        return f"it takes two operands of 1x128 or 128x128 blocks, {SWIZZLED_NAMES}"
    if (reason := request.hardware.lacks(needs)) is not None:
        return reason
    if request.swizzled:
        reason = optional.scaled_dot_problem(request.hardware, optional.release("triton"))
        if reason is not None:
            return f"{reason}, or install nvmath-python"
    return _unsupported_result(request)


def _unsupported_result(request: GemmRequest) -> str | None:
    if request.dtype not in _RESULTS:
        return f"the result is {request.dtype}; supported: bfloat16, float16 and float32"
    if not request.out_layout.row_major or request.out_layout.stride == 0:
        return "the rows of `out` are not contiguous"
    return None


def _unsupported_by_decode(request: GemmRequest) -> str | None:
    reason = request.unsupported_on_gpu or launch.unavailable_reason(request.hardware)
    if reason is not None:
        return reason
    for form in (request.a_format, request.b_format):
        if form not in BLOCK_FORMATS.values():
            return "it takes two operands of 1x128 or 128x128 blocks"
    if request.power_of_two:
        return "the values fit bfloat16, in which cuBLAS multiplies them faster"
    hardware = request.hardware
    reason = hardware.lacks("bf16 products") or hardware.lacks("cast kernels")
    return reason or _unsupported_result(request)


def _scales_in_instruction(request: GemmRequest) -> bool:
    """Whether the GPU's instruction reads the scales, and the installed Triton emits it."""
    needs = request.scaled_products
    native = needs is not None and request.hardware.has(needs)
    return (
        native and optional.scaled_dot_problem(request.hardware, optional.release("triton")) is None
    )


def runner(request: GemmRequest) -> Callable[..., Tensor]:
    """Return the function that computes a supported request."""
    if request.power_of_two and _scales_in_instruction(request):
        return run_exponents
    if not request.swizzled:
        return run_blocks
    return functools.partial(run_scaled, tma=request.hardware.has("tensor memory"))


def bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return run_on_device(runner(request))


def run_on_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run(a, ...)` on the device of the operand a."""

    def call(a: Operand, *rest: Any) -> Any:
        device = a.codes.get_device()
        if is_current_device(device):
            return run(a, *rest)
        with torch.cuda.device(device):
            return run(a, *rest)

    return call


def run_scaled(
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    activation: Activation = NO_ACTIVATION,
    *,
    tma: bool = False,
) -> Tensor:
    """Multiply MXFP8 or NVFP4 codes; tma: by TMA, where alignments permit it."""
    from ....common.kernels import scaled_product
    from ....common.kernels.product_parts import NO_TMA, Side

    assert a.format is not None and b.format is not None and a.format.block is not None
    codes = rows_dense(a.codes), rows_dense(b.codes)
    units = a.format.unit_amax, b.format.unit_amax
    sides = [
        Side(x.shape[0], x.stride(0), _ELEMENTS[x.dtype], 0 if amax is None else amax.numel())
        for x, amax in zip(codes, (a.amax, b.amax), strict=True)
    ]
    out, stride = _result(a, b, epilogue)
    swaps = _swaps(a, b)
    scales = swizzle_operand_scale(a), swizzle_operand_scale(b)
    record = scaled_product.product(
        *sides,
        a.depth,
        stride,
        length=a.format.block[1],
        packing=a.format.packing,
        factor=1.0 if units[0] is None or units[1] is None else 1.0 / (units[0] * units[1]),
        epilogue=_after(epilogue, activation),
        tma=_tma_options(codes, scales, (out, activation.x, activation.kept)) if tma else NO_TMA,
        swaps=swaps,
    )
    levels = (a.amax, b.amax) if units[0] is not None else (None, None)
    order = slice(None, None, -1 if swaps else 1)
    end = (epilogue.bias, activation.x, out, activation.kept)
    tensors = (*codes[order], *scales[order], *levels[order], *end)
    launch.start(record, tensors, a.codes.get_device())
    return out


def _tma_options(
    codes: tuple[Tensor, ...], scales: tuple[Tensor, ...], results: tuple[Tensor | None, ...]
) -> TmaOptions:
    """Return the tensors of a product whose addresses and rows are aligned for TMA."""
    from ....common.kernels.product_parts import TmaOptions

    operands = all(map(_is_aligned, codes)) and all(
        x.data_ptr() % launch.ALIGNMENT == 0 for x in scales
    )
    return TmaOptions(operands, all(x is None or _is_aligned(x) for x in results))


def _is_aligned(x: Tensor) -> bool:
    """Return whether a matrix with contiguous rows has elements, and its address and rows are aligned to 16 bytes."""
    pitch = x.stride(0) * x.element_size()
    return x.numel() > 0 and x.stride(1) == 1 and (x.data_ptr() | pitch) % launch.ALIGNMENT == 0


def run_blocks(
    a: Operand, b: Operand, epilogue: Epilogue, activation: Activation = NO_ACTIVATION
) -> Tensor:
    """Multiply FP8 codes with float32 scales per 1x128 or 128x128 block."""
    from ....common.kernels.promoted_product import block_product

    return _run_blocks(block_product, (), a, b, epilogue, activation)


def run_decoded(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Compute `run_blocks` by multiplying the codes' values in bfloat16, which represents them exactly."""
    from ....common.kernels.promoted_product import block_product

    decoding = functools.partial(block_product, decodes=True)
    return _run_blocks(decoding, (), a, b, epilogue, NO_ACTIVATION, torch.uint8)


def run_exponents(
    a: Operand, b: Operand, epilogue: Epilogue, activation: Activation = NO_ACTIVATION
) -> Tensor:
    """Multiply FP8 codes whose block scales are powers of two, by the MXFP8 instruction."""
    from ....common.kernels.scaled_product import exponent_product

    return _run_blocks(exponent_product, (None, None), a, b, epilogue, activation)


def _run_blocks(
    launch_of: Callable[..., launch.Launch],
    levels: tuple[None, ...],
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    activation: Activation,
    codes_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply operands with float32 block scales."""
    from ....common.kernels.product_parts import Side

    codes = rows_dense(a.codes), rows_dense(b.codes)
    sides, scales = [], (a.scale, b.scale)
    for operand, x in zip((a, b), codes, strict=True):
        assert operand.scale is not None
        unit = 1 if has_row_blocks(operand.format) else 128
        down, along = operand.scale.stride()
        sides.append(Side(x.shape[0], x.stride(0), _ELEMENTS[x.dtype], 0, unit, (down, along)))
    out, stride = _result(a, b, epilogue)
    swaps = _swaps(a, b)
    record = launch_of(*sides, a.depth, stride, epilogue=_after(epilogue, activation), swaps=swaps)
    order = slice(None, None, -1 if swaps else 1)
    end = (epilogue.bias, activation.x, out, activation.kept)
    if codes_dtype is not None:
        codes = codes[0].view(codes_dtype), codes[1].view(codes_dtype)
    launch.start(record, (*codes[order], *scales[order], *levels, *end), a.codes.get_device())
    return out


def _swaps(a: Operand, b: Operand) -> bool:
    """Return whether the product computes the transposed result, whose tile depends on the number of rows of a."""
    from ....common.kernels.product_parts import is_swapped

    return not requirements.batch_invariant and is_swapped(a.rows, b.rows)


def _after(epilogue: Epilogue, activation: Activation) -> ProductEpilogue:
    from ....common.kernels.product_parts import ProductEpilogue

    accumulates = epilogue.accumulate and epilogue.out is not None
    return ProductEpilogue(accumulates, activation.name, activation.kept is not None)


def _result(a: Operand, b: Operand, epilogue: Epilogue) -> tuple[Tensor, int]:
    """Return the result's tensor, and the elements between its rows."""
    out = epilogue.out
    if out is None:
        return a.codes.new_empty((a.rows, b.rows), dtype=epilogue.dtype), b.rows
    return out, b.rows if out.shape[0] == 1 else out.stride(0)


BACKEND = Backend(
    "triton", takes=EPILOGUES, unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
# For GPUs without FP8 products: it reads codes, half the bytes of bfloat16, and promotes the sum of every block.
DECODE = Backend(
    "decode",
    takes=EPILOGUES,
    unsupported_reason=_unsupported_by_decode,
    bind=lambda request: run_on_device(run_decoded),
    opaque=True,
)
