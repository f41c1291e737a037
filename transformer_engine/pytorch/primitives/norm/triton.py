"""The norms on GPUs: one pass over x and y forward, over x, dy and dx backward, and repeatable sums."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import DTYPE_NAMES, refuses_elementwise, run
from .request import NormRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias; mean, rstdev float32 [M]."""
    if torch.compiler.is_compiling():
        return torch.ops.transformer_engine.layernorm_forward(x, weight, bias, eps, zero_centered)
    return _layernorm_forward(x, weight, bias, eps, zero_centered)


def layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [M, H], dweight [H], dbias [H])"""
    if torch.compiler.is_compiling():
        return torch.ops.transformer_engine.layernorm_backward(dy, x, mean, rstdev, weight, zero_centered)
    return _backward(dy, x, None, mean, rstdev, weight, zero_centered)


def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """y [M, H] = x * rstdev * gamma; rstdev float32 [M]."""
    if torch.compiler.is_compiling():
        return torch.ops.transformer_engine.rmsnorm_forward(x, weight, eps, zero_centered)
    return _rmsnorm_forward(x, weight, eps, zero_centered)


def rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx [M, H] + add, dweight [H])"""
    if torch.compiler.is_compiling():
        return torch.ops.transformer_engine.rmsnorm_backward(dy, x, rstdev, weight, zero_centered, add)
    return _rmsnorm_backward(dy, x, rstdev, weight, zero_centered, add)


def _layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = _rows(x)
    if x.shape[0] == 0:
        return _fake_layernorm_forward(x, weight, bias, eps, zero_centered)
    launch = _forward_launch(
        x.shape, x.stride(0), x.dtype, weight.dtype, None if bias is None else bias.dtype, eps, zero_centered, True,
        x.device.index,
    )  # fmt: skip
    y, mean, rstdev = run(launch, (x, weight.contiguous(), None if bias is None else bias.contiguous()))
    return y, mean, rstdev


def _rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    x = _rows(x)
    if x.shape[0] == 0:
        return _fake_rmsnorm_forward(x, weight, eps, zero_centered)
    launch = _forward_launch(
        x.shape, x.stride(0), x.dtype, weight.dtype, None, eps, zero_centered, False, x.device.index
    )
    y, _, rstdev = run(launch, (x, weight.contiguous(), None))
    return y, rstdev


def _rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None
) -> tuple[Tensor, Tensor]:
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
    dy, x, weight = _rows(dy), _rows(x), weight.contiguous()
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    add = None if add is None else _rows(add)
    launches = _backward_launches(
        x.shape,
        (dy.stride(0), x.stride(0), 0 if add is None else add.stride(0)),
        (x.dtype, dy.dtype, None if add is None else add.dtype, weight.dtype),
        zero_centered,
        mean is not None,
        x.device.index,
    )
    outputs = run(launches[0], (dy, x, add, weight, mean, rstdev))
    workspace = outputs[1] if len(launches) == 2 else run(launches[1], (dy, x, mean, rstdev))[0]
    dweight, dbias = run(launches[-1], (workspace,))
    return outputs[0], dweight, dbias


def _rows(matrix: Tensor) -> Tensor:
    """The matrix with its columns next to each other; rows may lie apart."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


# The launch of a shape is kept with the kernel compiled for it, so every argument's dtype belongs to the key.
@functools.lru_cache(maxsize=1024)
def _forward_launch(
    shape: torch.Size,
    x_stride: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    eps: float,
    zero_centered: bool,
    centered: bool,
    device: int,
) -> Launch:
    from ....common.kernels import launch, norm

    return norm.forward(
        *shape, x_stride, DTYPE_NAMES[dtype], eps, zero_centered, centered, launch.processors(device)
    )


@functools.lru_cache(maxsize=1024)
def _backward_launches(
    shape: torch.Size,
    strides: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype],
    zero_centered: bool,
    centered: bool,
    device: int,
) -> tuple[Launch, ...]:
    from ....common.kernels import launch, norm

    names = DTYPE_NAMES[dtypes[0]], DTYPE_NAMES[dtypes[-1]]
    return norm.backward(*shape, strides, *names, zero_centered, centered, launch.processors(device))


def _fake_layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstdev = _fake_rmsnorm_forward(x, weight, eps, zero_centered)
    return y, torch.empty_like(rstdev), rstdev


def _fake_rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


def _fake_layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _fake_rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dy, x, None, mean, rstdev, weight, zero_centered)


register(
    "layernorm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered) -> (Tensor, Tensor, Tensor)",
    _layernorm_forward,
    _fake_layernorm_forward,
)
register(
    "layernorm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstdev, Tensor weight, bool zero_centered)"
    " -> (Tensor, Tensor, Tensor)",
    _layernorm_backward,
    _fake_layernorm_backward,
)
register(
    "rmsnorm_forward(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    _rmsnorm_forward,
    _fake_rmsnorm_forward,
)
register(
    "rmsnorm_backward(Tensor dy, Tensor x, Tensor rstdev, Tensor weight, bool zero_centered, Tensor? add)"
    " -> (Tensor, Tensor)",
    _rmsnorm_backward,
    _fake_rmsnorm_backward,
)

OPERATIONS = {
    "layernorm_forward": layernorm_forward,
    "layernorm_backward": layernorm_backward,
    "rmsnorm_forward": rmsnorm_forward,
    "rmsnorm_backward": rmsnorm_backward,
}


def refuses(request: NormRequest) -> str | None:
    return refuses_elementwise(request.device, request.dtype, request.weight_dtype)


BACKEND: Backend[NormRequest] = Backend("triton", OPERATIONS.__getitem__, refuses)
