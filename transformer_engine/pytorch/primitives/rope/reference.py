"""Rotary position embedding in float32 torch operations, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend


class RopeSpec(NamedTuple):
    """Rotation settings.

    Attributes:
        tensor_format: "sbhd" [s, b, h, d], "bshd" [b, s, h, d] or "thd" [t, h, d].
        interleaved: Features are paired (0, 1), (2, 3), ... instead of (i, i + d/2).
        cp_size: Context-parallel rank count. A sequence has 2 * cp_size equal chunks.
        cp_rank: This rank, which has the chunks cp_rank and 2 * cp_size - 1 - cp_rank.
        clamps: Tokens whose position is outside the angles are padding and use the nearest angles;
            otherwise they become NaN. Tokens after the last packed sequence are always padding.
    """

    tensor_format: str
    interleaved: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    clamps: bool = False


class Positions(NamedTuple):
    """Token positions.

    Attributes:
        start: Position of each sequence's first token [b]; None: 0.
        cu_seqlens: Sequence bounds [b + 1], for thd.
    """

    start: Tensor | None = None
    cu_seqlens: Tensor | None = None


class RopeRequest(NamedTuple):
    """The properties of one call.

    Attributes:
        operation: "forward", "backward", "qkv_forward" or "qkv_backward".
        x: Shape and strides of the rotated or joint tensor; for qkv_backward, of dk.
        angles: Angle shapes; for a joint tensor, of q and k.
        sequences: Packed sequence count.
        sizes: Sizes of a group's feature parts, for a joint tensor.
        separate: All query heads of a joint tensor come first, then all keys, then all values.
    """

    operation: str
    x: tuple[torch.Size, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    spec: RopeSpec
    angles: tuple[torch.Size, ...] = ()
    sequences: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
    separate: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """Groups, and query heads in each group, of a joint tensor; x is the joint tensor or dk."""
        queries_per_group, count = self.sizes[0] // self.sizes[1], self.x[0][-2]
        of_joint = self.separate and self.operation == "qkv_forward"
        return count // (queries_per_group + 2) if of_joint else count, queries_per_group


def bind(request: RopeRequest) -> Callable[..., Any]:
    """Return the operation.

    * forward: (x, angles, start, cu_seqlens) -> y
    * backward: (dy, angles, start, cu_seqlens) -> dx
    * qkv_forward: (qkv, q_angles, k_angles, start, cu_seqlens) -> q, k, v
    * qkv_backward: (dq, dk, dv, q_angles, k_angles, start, cu_seqlens) -> dqkv
    """
    spec, sizes = request.spec, request.sizes
    if request.operation == "forward":
        return lambda x, angles, *positions: forward(x, angles, Positions(*positions), spec)
    if request.operation == "backward":
        return lambda dy, angles, *positions: backward(dy, angles, Positions(*positions), spec)
    if request.operation == "qkv_forward":
        return lambda qkv, q, k, *positions: qkv_forward(
            qkv, q, k, Positions(*positions), sizes, spec, request.separate
        )
    return lambda dq, dk, dv, q, k, *positions: qkv_backward(
        dq, dk, dv, q, k, Positions(*positions), sizes, spec, request.separate
    )


def forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """Return y: y[..., :r] = x * cos(a) + pair(x) * sin(a); y[..., r:] = x[..., r:]."""
    cosine, sine, rotated, rest = _split(x, angles, positions, spec)
    y = rotated * cosine + _pair(rotated, spec.interleaved) * sine
    return torch.cat((y.to(x.dtype), rest), dim=-1)


def backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """Return dx: dx[..., :r] = dy * cos(a) - pair(dy * sin(a)); pair is antisymmetric, so its transpose is -pair."""
    cosine, sine, rotated, rest = _split(dy, angles, positions, spec)
    dx = rotated * cosine - _pair(rotated * sine, spec.interleaved)
    return torch.cat((dx.to(dy.dtype), rest), dim=-1)


def qkv_forward(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
    separate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous q and k from the joint tensor, rotated, and a copy of v."""
    if separate:
        queries_per_group = sizes[0] // sizes[1]
        groups = qkv.shape[-2] // (queries_per_group + 2)
        q, k, v = torch.split(qkv, [groups * queries_per_group, groups, groups], dim=-2)
    else:
        q, k, v = torch.split(qkv, list(sizes), dim=-1)
        q = q.reshape(*qkv.shape[:-2], -1, sizes[1])
    return (
        forward(q, q_angles, positions, spec),
        forward(k, k_angles, positions, spec),
        v.clone(memory_format=torch.contiguous_format),
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
    separate: bool = False,
) -> Tensor:
    """Return the joint gradient: the part gradients, rotated back and concatenated."""
    q, k = backward(dq, q_angles, positions, spec), backward(dk, k_angles, positions, spec)
    if separate:
        return torch.cat((q, k, dv), dim=-2)
    return torch.cat((q.reshape(*dk.shape[:-1], sizes[0]), k, dv), dim=-1)


def _split(
    x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cos and sin of each token's angles, the rotated features in float32, and the other features."""
    width = angles.shape[-1]
    angle = _token_angles(x, angles.float(), positions, spec).unsqueeze(-2)
    return torch.cos(angle), torch.sin(angle), x[..., :width].float(), x[..., width:]


def _pair(x: Tensor, interleaved: bool) -> Tensor:
    """Return (-x2, x1) for every feature pair (x1, x2)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _token_angles(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """Return angles [positions, r] at each token: [s, 1 | b, r], [1 | b, s, r] or [t, r]."""
    if spec.tensor_format == "thd":
        assert positions.cu_seqlens is not None
        bounds = positions.cu_seqlens.long() // spec.cp_size
        token = torch.arange(x.shape[0], device=bounds.device)
        sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(
            max=bounds.shape[0] - 2
        )
        position = _global_position(
            token - bounds[sequence], (bounds[1:] - bounds[:-1])[sequence], spec
        )
        if positions.start is not None:
            position = position + positions.start.long()[sequence]
        return _gather_angles(angles, position, True if spec.clamps else token >= bounds[-1])
    sequence_axis = 0 if spec.tensor_format == "sbhd" else 1
    position = _global_position(
        torch.arange(x.shape[sequence_axis], device=x.device), x.shape[sequence_axis], spec
    )
    if positions.start is None:
        return angles[position].unsqueeze(1 - sequence_axis)
    position = positions.start[:, None].long() + position[None, :]
    return _gather_angles(angles, position.t() if sequence_axis == 0 else position, spec.clamps)


def _gather_angles(angles: Tensor, position: Tensor, padding: Tensor | bool) -> Tensor:
    """Return angles [n, r] at each position; outside 0..n - 1 the nearest ones for padding, NaN for other tokens."""
    nearest = position.clamp(0, angles.shape[0] - 1)
    return torch.where(((nearest == position) | padding).unsqueeze(-1), angles[nearest], torch.nan)


def _global_position(position: Tensor, length: int | Tensor, spec: RopeSpec) -> Tensor:
    """Convert a local to a global position, for a rank with chunks cp_rank and 2 * cp_size - 1 - cp_rank."""
    if spec.cp_size == 1:
        return position
    half = length // 2
    first = position + spec.cp_rank * half
    second = position - half + (2 * spec.cp_size - 1 - spec.cp_rank) * half
    return torch.where(position < half, first, second)


BACKEND: Backend[RopeRequest] = Backend("reference", bind=bind)
