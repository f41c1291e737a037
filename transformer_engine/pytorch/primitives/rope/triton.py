"""The rotary embedding on GPUs: x is read once, y written once, and cosines and sines are computed in the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, rows_dense, run, unsupported_elementwise
from .reference import RopeRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def unsupported_reason(request: RopeRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    return unsupported_elementwise(request.device, request.dtype)


def bind(request: RopeRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    if request.operation == "qkv_forward":
        shape, sizes = request.x[0], request.sizes
        if shape.numel() == 0:
            return lambda qkv, *_: empty_parts(qkv, sizes, request.separate)
        launch, leading = _packed(request, *request.x, False), shape[:-2]

        def unpack(qkv: Tensor, *optional: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = run(launch, (*_ready(*optional), rows_dense(qkv)))[:3]
            return (
                q.view(*leading, *q.shape[2:]),
                k.view(*leading, *k.shape[2:]),
                v.view(*leading, *v.shape[2:]),
            )

        return unpack
    return _pack(request) if request.operation == "qkv_backward" else _rotate(request)


def _rotate(request: RopeRequest) -> Callable[..., Tensor]:
    """Return (x, angles, start, cu_seqlens) -> y[..., :r] = x * cos(a) + pair(x) * sin(a), y[..., r:] = x[..., r:].

    For a gradient, the transposed rotation."""
    shape = request.x[0]
    if shape.numel() == 0:
        return lambda x, *_: x.new_empty(shape)
    launch = _rotation(request)

    def rotate(
        x: Tensor, angles: Tensor, start: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        start = None if start is None else start.contiguous()
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        angles = angles.to(torch.float32).contiguous()
        return run(launch, (rows_dense(x), angles, start, cu_seqlens))[0].view(shape)

    return rotate


def _rotation(request: RopeRequest) -> Launch:
    from ....common.kernels import rope

    shape, strides = _four(*request.x, request.spec.tensor_format)
    spec, (angles,) = request.spec, request.angles
    return rope.rotate(
        (shape[0], shape[1], shape[2], shape[3]),
        (strides[0], strides[1], strides[2]),
        (angles[0], angles[1]),
        request.sequences,
        DTYPE_NAMES[request.dtype],
        layout=spec.tensor_format,
        interleaved=spec.interleaved,
        transposed=request.operation == "backward",
        context=(spec.cp_size, spec.cp_rank),
        clamps=spec.clamps,
    )


def _pack(request: RopeRequest) -> Callable[..., Tensor]:
    """Return (dq, dk, dv, q_angles, k_angles, start, cu_seqlens) -> the joint gradient, in one pass."""
    sizes, separate = request.sizes, request.separate
    joint = empty_joint(torch.empty(request.x[0], device="meta"), sizes, separate)
    if joint.numel() == 0:
        return lambda dq, dk, dv, *_: empty_joint(dk, sizes, separate)
    shape = joint.shape[-2:]
    launch = _packed(request, joint.shape, joint.stride(), True)

    def pack(dq: Tensor, dk: Tensor, dv: Tensor, *optional: Tensor | None) -> Tensor:
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        (dqkv,) = run(launch, (*_ready(*optional), None, *gradients))
        return dqkv.view(*dk.shape[:-2], *shape)

    return pack


def _ready(
    q_angles: Tensor | None,
    k_angles: Tensor | None,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    assert q_angles is not None and k_angles is not None
    return (
        q_angles.to(torch.float32).contiguous(),
        k_angles.to(torch.float32).contiguous(),
        None if start is None else start.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
    )


def _packed(
    request: RopeRequest, shape: torch.Size, strides: tuple[int, ...], transposed: bool
) -> Launch:
    """Return the launch for a joint tensor with this shape and these strides."""
    from ....common.kernels import rope_packed

    spec, (q_angles, k_angles) = request.spec, request.angles
    shape, strides = _four(shape, strides, spec.tensor_format)
    _, width, v_width = request.sizes
    return rope_packed.rotate_packed(
        (shape[0], shape[1]),
        request.heads,
        (width, v_width),
        (strides[0], strides[1], strides[2]),
        (min(q_angles[0], k_angles[0]), q_angles[1], k_angles[1]),
        request.sequences,
        DTYPE_NAMES[request.dtype],
        layout=spec.tensor_format,
        interleaved=spec.interleaved,
        transposed=transposed,
        context=(spec.cp_size, spec.cp_rank),
        clamps=spec.clamps,
        separate=request.separate,
    )


def _four(
    shape: torch.Size, strides: tuple[int, ...], layout: str
) -> tuple[torch.Size, tuple[int, ...]]:
    """Return shape and strides with four axes for the kernels: `rows_dense` of the tensor."""
    if strides[-1] != 1:
        strides = torch.empty(shape, device="meta").stride()
    if layout != "thd":
        return shape, strides
    return torch.Size((shape[0], 1, *shape[1:])), (strides[0], 0, *strides[1:])


def empty_parts(
    qkv: Tensor, sizes: tuple[int, int, int], separate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate q, k and v for a joint tensor."""
    *leading, groups, _ = qkv.shape
    queries_per_group = sizes[0] // sizes[1]
    if separate:
        groups = groups // (queries_per_group + 2)
    return (
        qkv.new_empty(*leading, groups * queries_per_group, sizes[1]),
        qkv.new_empty(*leading, groups, sizes[1]),
        qkv.new_empty(*leading, groups, sizes[2]),
    )


def empty_joint(dk: Tensor, sizes: tuple[int, int, int], separate: bool) -> Tensor:
    """Allocate the joint gradient."""
    if separate:
        *leading, groups, width = dk.shape
        return dk.new_empty(*leading, groups * (sizes[0] // sizes[1] + 2), width)
    return dk.new_empty(*dk.shape[:-1], sizes[0] + sizes[1] + sizes[2])


BACKEND: Backend[RopeRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
