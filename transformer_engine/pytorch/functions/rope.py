"""(q, k, v) of a packed tensor, q and k rotated to their positions, differentiable in the packed tensor."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function

from ..primitives.rope import Positions, RopeSpec, rope_qkv_backward, rope_qkv_forward


def rope_qkv(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `primitives.rope.rope_qkv_forward`: the packed tensor is read once, and its gradient written once."""
    return _RopeQkv.apply(qkv, q_angles, k_angles, *positions, sizes, spec)  # pyright: ignore[reportReturnType]


class _RopeQkv(Function):
    @staticmethod
    def forward(ctx, qkv, q_angles, k_angles, start, cu_seqlens, sizes, spec):
        ctx.save_for_backward(q_angles, k_angles, start, cu_seqlens)
        ctx.sizes, ctx.spec = sizes, spec
        return rope_qkv_forward(qkv, q_angles, k_angles, Positions(start, cu_seqlens), sizes, spec)

    @staticmethod
    def backward(ctx, dq, dk, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_angles, k_angles, start, cu_seqlens = ctx.saved_tensors
        positions = Positions(start, cu_seqlens)
        dqkv = rope_qkv_backward(dq, dk, dv, q_angles, k_angles, positions, ctx.sizes, ctx.spec)
        return dqkv, None, None, None, None, None, None
