"""The norms on GPUs: one pass over x and y forward, over x, dy and dx backward, and repeatable sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import Element
from .. import fused_codes, launching
from ..launching import DTYPE_NAMES, perform, refuses_elementwise, rows_dense, run, traceable
from ..quantize import Cast, Quantized, QuantizeSpec, quantize, quantize_as
from ..transpose import transposed_by_kernel
from .request import NormRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch
    from ....common.kernels.program import Program

_NO_CODES = (None, None)  # neither a scale nor a maximum
_WIDEST_CENTERED = 4096  # columns of a LayerNorm that makes the codes of blocks


def layernorm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    cast: Cast | None = None,
) -> tuple[Tensor | Quantized, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias, or its codes; mean, rstdev float32 [M]."""
    if cast is None:
        return _traceable_layernorm(x, weight, bias, eps, zero_centered)
    if not _fuses(x, cast, centered=True):
        y, mean, rstdev = _traceable_layernorm(x, weight, bias, eps, zero_centered)
        return quantize_as(y, cast), mean, rstdev
    bias = None if bias is None else bias.contiguous()
    made, mean, rstdev = _with_codes(x, weight, bias, eps, zero_centered, True, cast)
    assert mean is not None
    return made, mean, rstdev


def _layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias; mean, rstdev float32 [M]."""
    if x.shape[0] == 0:
        return _empty_layernorm(x, weight, bias, eps, zero_centered)
    x = rows_dense(x)
    launch = _forward_launch(x.shape, x.stride(0), x.dtype, eps, zero_centered, True, x.device.index)
    bias = None if bias is None else bias.contiguous()
    _, _, y, mean, rstdev = run(launch, (x, weight.contiguous(), bias, *_NO_CODES))
    return y, mean, rstdev


def layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [M, H] = rstdev * (g - E[g] - xhat * E[g * xhat]), g = dy * gamma; dweight = Σ dy * xhat; dbias = Σ dy."""
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    return _backward(dy, x, None, mean, rstdev, weight, zero_centered)


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    """y [M, H] = x * rstdev * gamma, or its codes; rstdev float32 [M]."""
    if cast is None:
        return _traceable_rmsnorm(x, weight, eps, zero_centered)
    if not _fuses(x, cast, centered=False):
        y, rstdev = _traceable_rmsnorm(x, weight, eps, zero_centered)
        return quantize_as(y, cast), rstdev
    made, _, rstdev = _with_codes(x, weight, None, eps, zero_centered, False, cast)
    return made, rstdev


def _rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """y [M, H] = x * rstdev * gamma; rstdev float32 [M]."""
    if x.shape[0] == 0:
        return _empty_rmsnorm(x, weight, eps, zero_centered)
    x = rows_dense(x)
    launch = _forward_launch(x.shape, x.stride(0), x.dtype, eps, zero_centered, False, x.device.index)
    _, _, y, _, rstdev = run(launch, (x, weight.contiguous(), None, *_NO_CODES))
    return y, rstdev


def _fuses(x: Tensor, cast: Cast, *, centered: bool) -> bool:
    """Blocks in both directions take tiles of 128 rows, hence a second read of x beside the one that made statistics.

    H200, 8192 x 4096 bfloat16: 0.0245 ms for RMSNorm's statistics and 0.058 for tiles against 0.082 for separate steps.
    Blocks of rows alone: RMSNorm 0.036 against 0.065, LayerNorm 0.039 against 0.067. With wider rows LayerNorm's kernel
    runs out of registers (0.100 against 0.084 at 5120), and its statistics differ in the last bit from those it makes
    without codes.
    """
    spec, narrow = cast.spec, not centered or x.shape[1] <= _WIDEST_CENTERED
    if fused_codes.in_blocks(spec) and not (narrow and fused_codes.in_row_blocks(spec)):
        return False
    return fused_codes.fuses((x.shape[0], x.shape[1]), x.dtype, x.device, cast)


def _with_codes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    centered: bool,
    cast: Cast,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """Codes of y from the kernel that makes y; their transpose from the codes, a quarter of the bytes of y's."""
    x, spec = rows_dense(x), cast.spec
    if fused_codes.in_blocks(spec):
        return _with_row_blocks(x, weight, bias, eps, zero_centered, centered, spec)
    scale, amax = fused_codes.given(cast, x.device)
    element = None if scale is None else spec.element
    launch = _forward_launch(
        x.shape, x.stride(0), x.dtype, eps, zero_centered, centered, x.device.index, element
    )
    codes, inverse, y, mean, rstdev = run(launch, (x, weight.contiguous(), bias, scale, amax))
    if element is None:
        return quantize(y, spec, amax=amax), mean, rstdev
    codes_t = transposed_by_kernel(codes) if spec.columnwise else None
    return Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax), mean, rstdev


def _with_row_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    centered: bool,
    spec: QuantizeSpec,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """The kernel that makes y holds whole rows, and so every 1 x 128 block of them."""
    launch = _forward_launch(
        x.shape, x.stride(0), x.dtype, eps, zero_centered, centered, x.device.index, None, spec
    )
    codes, scale, _, mean, rstdev = run(launch, (x, weight.contiguous(), bias, *_NO_CODES))
    return Quantized(codes, scale, None, None, None, None), mean, rstdev


def rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx [M, H] = rstdev * (g - xhat * E[g * xhat]) + add, g = dy * gamma; dweight = Σ dy * xhat."""
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.zeros_like(weight)
    return _backward(dy, x, add, None, rstdev, weight, zero_centered)[:2]


def _backward(
    dy: Tensor,
    x: Tensor,
    add: Tensor | None,
    mean: Tensor | None,
    rstdev: Tensor,
    weight: Tensor,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, add = rows_dense(dy), rows_dense(x), None if add is None else rows_dense(add)
    program = _backward_program(
        x.shape,
        (dy.stride(0), x.stride(0), 0 if add is None else add.stride(0)),
        (x.dtype, weight.dtype),
        zero_centered,
        mean is not None,
        dy.element_size() + x.element_size() + (0 if add is None else add.element_size()),
        x.device.index,
    )
    dx, dweight, dbias = perform(program, (dy, x, add, weight.contiguous(), mean, rstdev))
    return dx, dweight, dbias


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    shape: torch.Size,
    x_stride: int,
    dtype: torch.dtype,
    eps: float,
    zero_centered: bool,
    centered: bool,
    device: int,
    element: Element | None = None,
    in_blocks: QuantizeSpec | None = None,
) -> Launch:
    from ....common.kernels import norm  # it imports triton

    rows, width = shape
    return norm.forward(
        rows,
        width,
        x_stride,
        DTYPE_NAMES[dtype],
        eps,
        zero_centered,
        centered,
        launching.processors(device).count,
        element,
        None if in_blocks is None else fused_codes.blocks(in_blocks, dtype),
    )


@functools.lru_cache(maxsize=1024)
def _backward_program(
    shape: torch.Size,
    strides: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    zero_centered: bool,
    centered: bool,
    column_bytes: int,
    device: int,
) -> Program:
    from ....common.kernels import norm  # it imports triton

    rows, width = shape
    dtype, weight_dtype = DTYPE_NAMES[dtypes[0]], DTYPE_NAMES[dtypes[1]]
    return norm.backward(
        rows,
        width,
        strides,
        dtype,
        weight_dtype,
        zero_centered,
        centered,
        column_bytes,
        *launching.processors(device),
    )


def _empty_layernorm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstdev = _empty_rmsnorm(x, weight, eps, zero_centered)
    return y, torch.empty_like(rstdev), rstdev


def _empty_rmsnorm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


def _empty_layernorm_gradients(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _empty_rmsnorm_gradients(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_traceable_layernorm = traceable(
    "layernorm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered)"
    " -> (Tensor, Tensor, Tensor)",
    _layernorm_forward,
    _empty_layernorm,
)
_traceable_rmsnorm = traceable(
    "rmsnorm_forward(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    _rmsnorm_forward,
    _empty_rmsnorm,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "layernorm_forward": layernorm_forward,
    "layernorm_backward": traceable(
        "layernorm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstdev, Tensor weight, bool zero_centered)"
        " -> (Tensor, Tensor, Tensor)",
        layernorm_backward,
        _empty_layernorm_gradients,
    ),
    "rmsnorm_forward": rmsnorm_forward,
    "rmsnorm_backward": traceable(
        "rmsnorm_backward(Tensor dy, Tensor x, Tensor rstdev, Tensor weight, bool zero_centered,"
        " Tensor? add=None) -> (Tensor, Tensor)",
        rmsnorm_backward,
        _empty_rmsnorm_gradients,
    ),
}


def operation(name: str) -> Callable[..., Any]:
    return OPERATIONS[name]  # torch 2.11's tracer does not know a bound dict.__getitem__


def refuses(request: NormRequest) -> str | None:
    return refuses_elementwise(request.device, request.dtype, request.weight_dtype)


BACKEND: Backend[NormRequest] = Backend("triton", operation, refuses)
