"""The rotary embedding on GPUs: x read once, y written once, cosines and sines made on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import DTYPE_NAMES, refuses_elementwise, rows_dense, run, traceable
from .request import Positions, RopeRequest, RopeSpec

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """y[..., :r] = x * cos(a) + pair(x) * sin(a); y[..., r:] = x[..., r:]"""
    return _traceable_rotate(x, angles, positions.start, positions.cu_seqlens, *_flat(spec), False)


def backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """dx[..., :r] = dy * cos(a) - pair(dy * sin(a)); dx[..., r:] = dy[..., r:]"""
    return _traceable_rotate(dy, angles, positions.start, positions.cu_seqlens, *_flat(spec), True)


def qkv_forward(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated and v copied out of the joint tensor, in one pass."""
    return _traceable_unpack(
        qkv, q_angles, k_angles, positions.start, positions.cu_seqlens, sizes, *_flat(spec)
    )


def qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
) -> Tensor:
    """The joint gradient, in one pass."""
    return _traceable_pack(
        dq, dk, dv, q_angles, k_angles, positions.start, positions.cu_seqlens, sizes, *_flat(spec)
    )


def _flat(spec: RopeSpec) -> tuple[str, bool, int, int, bool]:
    return spec.tensor_format, spec.interleaved, spec.cp_size, spec.cp_rank, spec.clamps


def _rotate(
    x: Tensor,
    angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
    transposed: bool,
) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    x = rows_dense(x)
    launch = _launch(
        x.shape,
        x.stride(),
        angles.shape,
        _sequences(cu_seqlens),
        x.dtype,
        (tensor_format, interleaved, transposed),
        (cp_size, cp_rank),
        clamps,
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
    clamps: bool,
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
        clamps=clamps,
    )


def _unpack(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int],
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    how = (tensor_format, interleaved, cp_size, cp_rank, clamps)
    if qkv.numel() == 0:
        return _empty_parts(qkv, q_angles, k_angles, start, cu_seqlens, sizes, *how)
    qkv = rows_dense(qkv)
    widths = _angles(q_angles, k_angles)
    launch = _packed_launch(
        qkv.shape, qkv.stride(), widths, _sequences(cu_seqlens), tuple(sizes), qkv.dtype, how, False
    )
    q, k, v = run(launch, (qkv, *_ready(q_angles, k_angles, start, cu_seqlens)))
    leading = qkv.shape[:-2]
    return tuple(part.view(*leading, *part.shape[2:]) for part in (q, k, v))  # pyright: ignore[reportReturnType]


def _pack(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int],
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
) -> Tensor:
    how = (tensor_format, interleaved, cp_size, cp_rank, clamps)
    dqkv = _empty_joint(dq, dk, dv, q_angles, k_angles, start, cu_seqlens, sizes, *how)
    if dqkv.numel() == 0:
        return dqkv
    widths = _angles(q_angles, k_angles)
    launch = _packed_launch(
        dqkv.shape, dqkv.stride(), widths, _sequences(cu_seqlens), tuple(sizes), dk.dtype, how, True
    )
    gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
    run(launch, (dqkv, *_ready(q_angles, k_angles, start, cu_seqlens), *gradients))
    return dqkv


def _angles(q_angles: Tensor, k_angles: Tensor) -> tuple[int, int, int]:
    """(positions, rotated features of q and of k)"""
    return min(q_angles.shape[0], k_angles.shape[0]), q_angles.shape[1], k_angles.shape[1]


def _sequences(cu_seqlens: Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _ready(
    q_angles: Tensor, k_angles: Tensor, start: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        q_angles.to(torch.float32).contiguous(),
        k_angles.to(torch.float32).contiguous(),
        None if start is None else start.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
    )


@functools.lru_cache(maxsize=1024)
def _packed_launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    angles: tuple[int, int, int],
    sequences: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    how: tuple[str, bool, int, int, bool],
    transposed: bool,
) -> Launch:
    from ....common.kernels import rope  # it imports triton

    layout, interleaved, cp_size, cp_rank, clamps = how
    if layout == "thd":
        shape, strides = torch.Size((shape[0], 1, *shape[1:])), (strides[0], 0, *strides[1:])
    q_size, width, v_width = sizes
    return rope.rotate_packed(
        (shape[0], shape[1]),
        (shape[2], q_size // width),
        (width, v_width),
        (strides[0], strides[1], strides[2]),
        angles,
        sequences,
        DTYPE_NAMES[dtype],
        layout=layout,
        interleaved=interleaved,
        transposed=transposed,
        context=(cp_size, cp_rank),
        clamps=clamps,
    )


def _empty_parts(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int],
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    *leading, groups, _ = qkv.shape
    return (
        qkv.new_empty(*leading, groups * (sizes[0] // sizes[1]), sizes[1]),
        qkv.new_empty(*leading, groups, sizes[1]),
        qkv.new_empty(*leading, groups, sizes[2]),
    )


def _empty_joint(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, int, int],
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
) -> Tensor:
    return dk.new_empty(*dk.shape[:-1], sizes[0] + sizes[1] + sizes[2])


def _empty(
    x: Tensor,
    angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    tensor_format: str,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    clamps: bool,
    transposed: bool,
) -> Tensor:
    return x.new_empty(x.shape)


_traceable_rotate = traceable(
    "rotate(Tensor x, Tensor angles, Tensor? start, Tensor? cu_seqlens, str tensor_format, bool interleaved,"
    " int cp_size, int cp_rank, bool clamps, bool transposed) -> Tensor",
    _rotate,
    _empty,
)

_HOW = (
    "Tensor? start, Tensor? cu_seqlens, int[3] sizes, str tensor_format, bool interleaved, int cp_size, int cp_rank,"
    " bool clamps"
)
_traceable_unpack = traceable(
    f"rotate_unpack(Tensor qkv, Tensor q_angles, Tensor k_angles, {_HOW}) -> (Tensor, Tensor, Tensor)",
    _unpack,
    _empty_parts,
)
_traceable_pack = traceable(
    f"rotate_pack(Tensor dq, Tensor dk, Tensor dv, Tensor q_angles, Tensor k_angles, {_HOW}) -> Tensor",
    _pack,
    _empty_joint,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "backward": backward,
    "qkv_forward": qkv_forward,
    "qkv_backward": qkv_backward,
}


def operation(name: str) -> Callable[..., Any]:
    return OPERATIONS[name]


def refuses(request: RopeRequest) -> str | None:
    return refuses_elementwise(request.device, request.dtype)


BACKEND: Backend[RopeRequest] = Backend("triton", operation, refuses)
