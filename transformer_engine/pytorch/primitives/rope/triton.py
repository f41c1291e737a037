"""The rotary embedding on GPUs: x read once, y written once, cosines and sines made on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import DTYPE_NAMES, refuses_elementwise, run, traceable
from .request import Positions, RopeRequest, RopeSpec

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """y[..., :r] = x * cos(a) + pair(x) * sin(a); y[..., r:] = x[..., r:]"""
    return _traceable_rotate(x, angles, positions.start, positions.cu_seqlens, *_flat(spec), False)


def backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """dx[..., :r] = dy * cos(a) - pair(dy * sin(a)); dx[..., r:] = dy[..., r:]"""
    return _traceable_rotate(dy, angles, positions.start, positions.cu_seqlens, *_flat(spec), True)


def _flat(spec: RopeSpec) -> tuple[str, bool, int, int]:
    return spec.tensor_format, spec.interleaved, spec.cp_size, spec.cp_rank


def _rotate(
    x: Tensor,
    angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    transposed: bool,
) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    if x.stride(-1) != 1:
        x = x.contiguous()
    launch = _launch(
        x.shape,
        x.stride(),
        angles.shape,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        x.dtype,
        (tensor_format, interleaved, transposed),
        (cp_size, cp_rank),
    )
    angles = angles.to(torch.float32).contiguous()
    start = None if start is None else start.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    return run(launch, (x, angles, start, cu_seqlens))[0].view(x.shape)


@functools.lru_cache(maxsize=1024)
def _launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    angles: torch.Size,
    sequences: int,
    dtype: torch.dtype,
    how: tuple[str, bool, bool],
    context: tuple[int, int],
) -> Launch:
    from ....common.kernels import rope  # it imports triton

    layout, interleaved, transposed = how
    if layout == "thd":
        shape, strides = torch.Size((shape[0], 1, *shape[1:])), (strides[0], 0, *strides[1:])
    return rope.rotate(
        (shape[0], shape[1], shape[2], shape[3]),
        (strides[0], strides[1], strides[2]),
        (angles[0], angles[1]),
        sequences,
        DTYPE_NAMES[dtype],
        layout=layout,
        interleaved=interleaved,
        transposed=transposed,
        context=context,
    )


def _empty(
    x: Tensor,
    angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    transposed: bool,
) -> Tensor:
    return x.new_empty(x.shape)


_traceable_rotate = traceable(
    "rotate(Tensor x, Tensor angles, Tensor? start, Tensor? cu_seqlens, str tensor_format, bool interleaved,"
    " int cp_size, int cp_rank, bool transposed) -> Tensor",
    _rotate,
    _empty,
)

OPERATIONS = {"forward": forward, "backward": backward}


def operation(name: str) -> Callable[..., Tensor]:
    return OPERATIONS[name]


def refuses(request: RopeRequest) -> str | None:
    return refuses_elementwise(request.device, request.dtype)


BACKEND: Backend[RopeRequest] = Backend("triton", operation, refuses)
