"""Formats with a scale a tile on a GPU, in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.kernels.launch import Launch
from ....common.kernels.program import Program, step
from ...runtime.launching import Performed
from .spec import Quantized, QuantizeSpec, Request

# (spec, shape, dtype, device) -> the launch
LaunchOf = Callable[[QuantizeSpec, "tuple[int, int]", torch.dtype, torch.device], Launch]
_MADE = ("codes", "scale", "codes_t", "scale_t")


def tiled_call(launch_of: LaunchOf, request: Request) -> Callable[[Tensor], Quantized]:
    """The codes and scales of matrices of one shape and dtype on one device, as one spec asks for them."""
    launch = launch_of(request.spec, request.shape, request.dtype, request.device)
    only = step(launch, ("x",), _MADE[: len(launch.outputs)])
    performed = Performed(Program(("x",), (only,), only.outputs), request.device)
    return lambda x: Quantized(*performed(x if x.is_contiguous() else x.contiguous()))
