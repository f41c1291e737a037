"""Rotary position embedding under the extension's names: forward, backward, and for packed q, k, v."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from transformer_engine.common.numbers import to_bool, to_int
from transformer_engine.pytorch.primitives import rope
from transformer_engine.pytorch.primitives.rope import (
    Positions,
    RopeSpec,
    check_rotation,
    three_sizes,
)

from .enums import NVTE_QKV_Format
from .kv_cache import format_name

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]

Format = NVTE_QKV_Format | int | str


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate input [.., h, d] by the angles freqs float32 [s, 1, 1, d] of its tokens' positions."""
    spec = _spec(qkv_format, interleaved, cp_size, cp_rank)
    return rope.rope_forward(
        *_check_rotation(input, freqs, Positions(start_positions, cu_seqlens), spec)
    )


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Compute the input gradient for fused_rope_forward."""
    spec = _spec(qkv_format, interleaved, cp_size, cp_rank)
    return rope.rope_backward(
        *_check_rotation(output_grads, freqs, Positions(start_positions, cu_seqlens), spec)
    )


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Format,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [.., groups, q_size + k_size + v_size] into q, k, v and rotate q and k; a head has k_size features."""
    spec = _spec(qkv_format, interleaved, cp_size, cp_rank)
    sizes = three_sizes(qkv_split_arg_list)
    positions = Positions(start_positions)
    for freqs in (q_freqs, k_freqs):
        check_rotation(qkv_input, freqs, positions, spec, sizes[1])
    return rope.rope_qkv_forward(
        qkv_input,
        _angles(q_freqs),
        _angles(k_freqs),
        positions,
        sizes,
        spec,
    )


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Format,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    *,
    start_positions: Tensor | None = None,
) -> Tensor:
    """Compute the input gradient for fused_qkv_rope_forward, with its start_positions."""
    spec = _spec(qkv_format, interleaved, cp_size, cp_rank)
    sizes = three_sizes(qkv_split_arg_list)
    positions = Positions(start_positions)
    for freqs in (q_freqs, k_freqs):
        check_rotation(k_grad_out, freqs, positions, spec, sizes[1])
    return rope.rope_qkv_backward(
        q_grad_out,
        k_grad_out,
        v_grad_out,
        _angles(q_freqs),
        _angles(k_freqs),
        positions,
        sizes,
        spec,
    )


def _spec(qkv_format: Format, interleaved: bool, cp_size: int, cp_rank: int) -> RopeSpec:
    """A rotation's layout, with flags and numbers converted from any form."""
    return RopeSpec(
        format_name(qkv_format),
        to_bool("interleaved", interleaved),
        to_int("cp_size", cp_size),
        to_int("cp_rank", cp_rank),
    )


def _check_rotation(
    x: Tensor, freqs: Tensor, positions: Positions, spec: RopeSpec
) -> tuple[Tensor, Tensor, Positions, RopeSpec]:
    """Validate and return a rotation's arguments."""
    check_rotation(x, freqs, positions, spec, x.shape[-1])
    return x, _angles(freqs), positions, spec


def _angles(freqs: Tensor) -> Tensor:
    """Reshape [positions, 1, 1, d] to [positions, d]."""
    return freqs.reshape(freqs.shape[0], freqs.shape[-1])
