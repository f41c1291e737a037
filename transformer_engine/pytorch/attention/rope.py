"""Rotary position embedding: angles[s] = s * base^(-2i/d), applied to queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.checks import number, positive, suggests_keywords
from ...common.numbers import to_bool, to_float, to_int
from ..compat.argument_orders import declare_call
from ..primitives.rope import (
    Positions,
    RopeSpec,
    check_rotation,
    rope_backward,
    rope_forward,
    rope_qkv_backward,
    rope_qkv_forward,
    three_sizes,
)
from ..runtime.autograd import Function
from ..runtime.device import canonical_device
from ..runtime.double_backward import is_recorded, transposed
from ..runtime.warn_once import warn_once


class RotaryPositionEmbedding(nn.Module):
    """Compute angles [s, 1, 1, d] float32 = position * rotary_base^(-2i/d), each of the d/2 frequencies twice.

    Args:
        dim: Size d of the rotated part of a head.
        rotary_percent: Rotated share of `dim`.
        seq_len_interpolation_factor: Divide positions by this factor.
        pretrained_max_position_embeddings: The pretrained model's length. With an interpolation
            factor, longer sequences stretch over this length times the factor.
        rotary_base: Frequency base.
        interleaved: Order angles for rotating neighboring features instead of the two halves of a head.
    """

    inv_freq: Tensor

    @suggests_keywords
    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        dim = to_int("dim", dim, 1)
        rotary_percent = to_float("rotary_percent", rotary_percent)
        positive("rotary_percent", rotary_percent)
        if rotary_percent > 1.0:
            warn_once(
                "rotary_percent",
                f"rotary_percent={rotary_percent} is above 1 and rotates all {dim} features, as 1.0 does",
            )
        if seq_len_interpolation_factor is not None:
            seq_len_interpolation_factor = to_float(
                "seq_len_interpolation_factor", seq_len_interpolation_factor
            )
            positive("seq_len_interpolation_factor", seq_len_interpolation_factor)
        if pretrained_max_position_embeddings is not None:
            pretrained_max_position_embeddings = to_int(
                "pretrained_max_position_embeddings", pretrained_max_position_embeddings, 1
            )
        rotary_base = to_float("rotary_base", rotary_base)
        positive("rotary_base", rotary_base)
        interleaved = to_bool("interleaved", interleaved)
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        if dim % 2:
            raise ValueError(
                f"dim * rotary_percent = {dim} is odd; features rotate in pairs, choose an even number"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        exponent = (
            torch.arange(0, dim, 2, dtype=torch.float32, device=canonical_device("cuda")) / dim
        )
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponent))

    def forward(self, max_seq_len: int, offset: float = 0) -> Tensor:
        """Return the angles [max_seq_len, 1, 1, d] for the positions offset, offset + 1, ...

        Args:
            max_seq_len: Position count.
            offset: First position; it may be fractional or negative.
        """
        if not torch.compiler.is_compiling():
            max_seq_len = to_int("max_seq_len", max_seq_len, 0)
            if type(offset) is not int:
                offset = to_float("offset", offset)
                number("offset", offset)
        frequency = self.inv_freq.float()
        position = torch.arange(max_seq_len, dtype=torch.float32, device=frequency.device) + offset
        angles = (position * self._interpolation(max_seq_len))[:, None] * frequency
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]

    if TYPE_CHECKING:

        @declare_call(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _interpolation(self, max_seq_len: int) -> float:
        """Return the position divisor: the given factor, or one for a sequence longer than in training."""
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is None:
            return 1.0
        if trained is not None and max_seq_len > trained * factor:
            return trained / max_seq_len
        return 1.0 / factor


class ApplyRope(Function):
    """Autograd shell around rope_forward and rope_backward; the angles get no gradient."""

    OPERATION = "apply_rotary_pos_emb"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        angles: Tensor,
        start: Tensor | None,
        cu_seqlens: Tensor | None,
        spec: RopeSpec,
    ) -> Tensor:
        ctx.save_for_backward(angles, start, cu_seqlens)
        ctx.spec = spec
        return rope_forward(x, angles, Positions(start, cu_seqlens), spec)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        angles, start, cu_seqlens = ctx.saved_tensors
        positions, spec = Positions(start, cu_seqlens), ctx.spec
        if is_recorded():
            grad_input = transposed(
                lambda dy: rope_backward(dy, angles, positions, spec),
                lambda dx: rope_forward(dx, angles, positions, spec),
                grad_output,
            )
        else:
            grad_input = rope_backward(grad_output, angles, positions, spec)
        return grad_input, None, None, None, None


class ApplyPackedRope(Function):
    """Autograd shell around rope_qkv_forward and rope_qkv_backward; the angles get no gradient."""

    OPERATION = "apply_fused_qkv_rotary_pos_emb"

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_angles: Tensor,
        k_angles: Tensor,
        start: Tensor | None,
        cu_seqlens: Tensor | None,
        sizes: tuple[int, int, int],
        spec: RopeSpec,
        separate: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q_angles, k_angles, start, cu_seqlens)
        ctx.rest = rest = sizes, spec, separate
        return rope_qkv_forward(qkv, q_angles, k_angles, Positions(start, cu_seqlens), *rest)

    @staticmethod
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_angles, k_angles, start, cu_seqlens = ctx.saved_tensors
        positions = Positions(start, cu_seqlens)
        rest = (q_angles, k_angles, positions, *ctx.rest)
        if is_recorded():
            grad_qkv = transposed(
                lambda dq, dk, dv: rope_qkv_backward(dq, dk, dv, *rest),
                lambda grad_qkv: rope_qkv_forward(grad_qkv, *rest),
                grad_q,
                grad_k,
                grad_v,
            )
        else:
            grad_qkv = rope_qkv_backward(grad_q, grad_k, grad_v, *rest)
        return grad_qkv, None, None, None, None, None, None, None


class FusedRoPEFunc(Function):
    """`apply_rotary_pos_emb` as an autograd function, with positional arguments; the angles get no gradient."""

    OPERATION = "apply_rotary_pos_emb"

    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        freqs: Tensor,
        start_positions: Tensor | None = None,
        tensor_format: str = "sbhd",
        interleaved: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> Tensor:
        spec = _spec(tensor_format, interleaved, cp_size, cp_rank)
        check_rotation(t, freqs, Positions(start_positions, cu_seqlens), spec, t.shape[-1])
        return ApplyRope.forward(ctx, t, _angles(freqs), start_positions, cu_seqlens, spec)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ApplyRope.backward(ctx, grad_output)[0], *[None] * 7


class FusedQKVRoPEFunc(Function):
    """`apply_fused_qkv_rotary_pos_emb` as an autograd function, with positional arguments."""

    OPERATION = "apply_fused_qkv_rotary_pos_emb"

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_freqs: Tensor,
        k_freqs: Tensor,
        qkv_split_arg_list: Sequence[int],
        start_positions: Tensor | None = None,
        tensor_format: str = "sbhd",
        interleaved: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = _spec(tensor_format, interleaved, cp_size, cp_rank)
        sizes = _split_sizes(qkv, qkv_split_arg_list)
        for freqs in (q_freqs, k_freqs):
            check_rotation(qkv, freqs, Positions(start_positions, cu_seqlens), spec, sizes[1])
        angles = _angles(q_freqs), _angles(k_freqs)
        return ApplyPackedRope.forward(ctx, qkv, *angles, start_positions, cu_seqlens, sizes, spec)

    @staticmethod
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        return ApplyPackedRope.backward(ctx, grad_q, grad_k, grad_v)[0], *[None] * 9


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate t by freqs [s, 1, 1, d] (angles) at each token's position; see RopeSpec for the layouts.

    Args:
        t: Queries or keys in `tensor_format`.
        freqs: Rotation angles for all positions.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: Offset per sequence [b].
        interleaved: Pairs are adjacent features; otherwise half the rotated width apart.
        fused: Has no effect.
        cu_seqlens: "thd" sequence bounds [b + 1] for whole sequences, not for a context-parallel rank's part.
        cp_size: Context-parallel rank count.
        cp_rank: This context-parallel rank.

    Raises:
        ValueError: freqs is too short. start_positions and cu_seqlens on a GPU are only checked with TE_CHECK=1;
            otherwise, a token whose position has no angle becomes NaN.
    """
    spec = _spec(tensor_format, interleaved, cp_size, cp_rank)
    positions = Positions(start_positions, cu_seqlens)
    check_rotation(t, freqs, positions, spec, t.shape[-1])
    return rotate(t, freqs, spec, positions)


def rotate(t: Tensor, freqs: Tensor, spec: RopeSpec, positions: Positions) -> Tensor:
    """Compute apply_rotary_pos_emb for arguments that `check_rotation` has accepted."""
    return ApplyRope.apply(t, _angles(freqs), positions.start, positions.cu_seqlens, spec)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed projections into queries, keys and values, and rotate the queries and keys.

    Args:
        qkv: Packed projections [..., groups, q_size + k_size + v_size]; one head has k_size features.
        q_freqs: Query rotation angles [s, 1, 1, d].
        k_freqs: Key rotation angles [s, 1, 1, d].
        qkv_split_arg_list: (q_size, k_size, v_size).
        fused: Has no effect; the rotation is always one fused operation.

    The remaining arguments are as in `apply_rotary_pos_emb`.

    Returns:
        Contiguous q [..., groups * q_size / k_size, k_size], k and v.
    """
    sizes = _split_sizes(qkv, qkv_split_arg_list)
    spec = _spec(tensor_format, interleaved, cp_size, cp_rank)
    positions = Positions(start_positions, cu_seqlens)
    for freqs in (q_freqs, k_freqs):
        check_rotation(qkv, freqs, positions, spec, sizes[1])
    return rotate_qkv(qkv, (q_freqs, k_freqs), sizes, spec, positions)


def _split_sizes(qkv: Tensor, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return (q_size, k_size, v_size) for one group; ValueError unless they fit the packed projections."""
    q_size, k_size, v_size = three_sizes(sizes)
    if q_size + k_size + v_size != qkv.shape[-1]:
        raise ValueError(
            f"qkv_split_arg_list={list(sizes)} does not add up to {qkv.shape[-1]}, the last axis; "
            "give the sizes of one group's queries, key and value"
        )
    if k_size < 1 or q_size % k_size:
        raise ValueError(
            f"the query part {q_size} is not a multiple of the key part {k_size}; split by whole heads"
        )
    return q_size, k_size, v_size


def rotate_qkv(
    qkv: Tensor,
    freqs: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    spec: RopeSpec,
    positions: Positions,
    separate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute apply_fused_qkv_rotary_pos_emb for checked arguments; freqs are for queries and keys.

    With `separate`, qkv is [.., heads, d]: all query heads, then all keys, then all values.
    """
    q_angles, k_angles = _angles(freqs[0]), _angles(freqs[1])
    start, bounds = positions
    return ApplyPackedRope.apply(qkv, q_angles, k_angles, start, bounds, sizes, spec, separate)


def _spec(tensor_format: str, interleaved: Any, cp_size: Any, cp_rank: Any) -> RopeSpec:
    """Return the layout for a rotation, with flags and numbers converted from any form."""
    return RopeSpec(
        tensor_format,
        to_bool("interleaved", interleaved),
        to_int("cp_size", cp_size),
        to_int("cp_rank", cp_rank),
    )


def _angles(freqs: Tensor) -> Tensor:
    """Reshape [positions, 1, 1, d] to [positions, d]."""
    return freqs.reshape(freqs.shape[0], freqs.shape[-1])
