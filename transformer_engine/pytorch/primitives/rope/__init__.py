"""y = x rotated in feature pairs by an angle that grows with the token's position, and its gradient.

Su et al., RoFormer (2021). `angles` is float32 [positions, rotated features]; other features are copied. Public callers
use `check_rotation`; these functions do not check their arguments, but a token whose position has no angle becomes NaN
(RopeSpec.clamps).
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from . import reference, triton
from .checks import check_rotation as check_rotation
from .checks import reaches_lengths as reaches_lengths
from .checks import three_sizes as three_sizes
from .reference import Positions, RopeRequest, RopeSpec


def rope_forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """y = x * cos(a) + pair(x) * sin(a), in float32, returned in x's dtype; the layout of x is spec.tensor_format."""
    return _run_rotation("forward", x, angles, *positions, spec)


def rope_backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """dx = dy * cos(a) - pair(dy * sin(a)): the transposed rotation, in float32, returned in dy's dtype."""
    return _run_rotation("backward", dy, angles, *positions, spec)


def rope_qkv_forward(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
    separate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a QKV projection, and rotate queries and keys.

    Returns contiguous q [.., g * n, d], k [.., g, d] and v [.., g, dv] from qkv [.., g, n * d + d + dv].

    sizes = (n * d, d, dv) are the parts of a group's features; the leading axes follow spec.tensor_format. With
    `separate`, qkv is [.., g * n + g + g, d], with dv = d: all query heads, then all keys, then all values.
    """
    if separate:
        if sizes[1:] != (qkv.shape[-1],) * 2 or qkv.shape[-2] % (sizes[0] // sizes[1] + 2):
            raise ValueError(
                f"the heads {list(qkv.shape[-2:])} are not queries, keys and values in the ratio of {list(sizes)}; "
                "give n * d, d, d"
            )
    elif sum(sizes) != qkv.shape[-1]:
        raise ValueError(
            f"the split {list(sizes)} does not add up to the {qkv.shape[-1]} features of a group; give n * d, d, dv"
        )
    if sizes[1] < 1 or sizes[0] % sizes[1]:
        raise ValueError(
            f"the query part {sizes[0]} is not a multiple of the key part {sizes[1]}; split by heads"
        )
    start, cu_seqlens = positions
    layout, shapes = (qkv.shape, qkv.stride()), (q_angles.shape, k_angles.shape)
    key = (
        "qkv_forward",
        layout,
        qkv.dtype,
        qkv.device,
        spec,
        shapes,
        _sequences(cu_seqlens),
        sizes,
        separate,
    )
    return TABLE.bound(key)(qkv, q_angles, k_angles, start, cu_seqlens)


def rope_qkv_backward(
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
    """Return dqkv in the shape of qkv, contiguous, from the gradients for the results of rope_qkv_forward."""
    if (dq.shape[-2] * dq.shape[-1], dk.shape[-1], dv.shape[-1]) != (
        dk.shape[-2] * sizes[0],
        *sizes[1:],
    ):
        raise ValueError(
            f"gradients {list(dq.shape)}, {list(dk.shape)}, {list(dv.shape)} do not fit the split {list(sizes)}; "
            "give those of the results of rope_qkv_forward"
        )
    start, cu_seqlens = positions
    layout, shapes = (dk.shape, dk.stride()), (q_angles.shape, k_angles.shape)
    key = (
        "qkv_backward",
        layout,
        dk.dtype,
        dk.device,
        spec,
        shapes,
        _sequences(cu_seqlens),
        sizes,
        separate,
    )
    return TABLE.bound(key)(dq, dk, dv, q_angles, k_angles, start, cu_seqlens)


def _run_rotation(
    operation: str,
    x: Tensor,
    angles: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: RopeSpec,
) -> Tensor:
    layout = (x.shape, x.stride())
    key = (operation, layout, x.dtype, x.device, spec, (angles.shape,), _sequences(cu_seqlens))
    return TABLE.bound(key)(x, angles, start, cu_seqlens)


def _sequences(cu_seqlens: Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


# The operators for torch.compile, with argument types that schemas support.


def _rotate(
    x, angles, start, cu_seqlens, tensor_format, interleaved, cp_size, cp_rank, clamps, transposed
):
    spec = RopeSpec(tensor_format, interleaved, cp_size, cp_rank, clamps)
    return _run_rotation(
        "backward" if transposed else "forward", x, angles, start, cu_seqlens, spec
    )


def _unpack(qkv, q_angles, k_angles, start, cu_seqlens, sizes, separate, *how):
    positions = Positions(start, cu_seqlens)
    return rope_qkv_forward(
        qkv, q_angles, k_angles, positions, tuple(sizes), RopeSpec(*how), separate
    )


def _pack(dq, dk, dv, q_angles, k_angles, start, cu_seqlens, sizes, separate, *how):
    positions, spec = Positions(start, cu_seqlens), RopeSpec(*how)
    return rope_qkv_backward(
        dq, dk, dv, q_angles, k_angles, positions, tuple(sizes), spec, separate
    )


_HOW = "str tensor_format, bool interleaved, int cp_size, int cp_rank, bool clamps"
_POSITIONS = "Tensor? start, Tensor? cu_seqlens"
_rotate_operator = operator(
    f"rotate(Tensor x, Tensor angles, {_POSITIONS}, {_HOW}, bool transposed) -> Tensor",
    _rotate,
    lambda x, *_, **__: x.new_empty(x.shape),
)
_unpack_operator = operator(
    f"rotate_unpack(Tensor qkv, Tensor q_angles, Tensor k_angles, {_POSITIONS}, int[3] sizes, bool separate, {_HOW})"
    " -> (Tensor, Tensor, Tensor)",
    _unpack,
    lambda qkv, q_angles, k_angles, start, cu_seqlens, sizes, separate, *_, **__: (
        triton.empty_parts(qkv, sizes, separate)
    ),
)
_pack_operator = operator(
    "rotate_pack(Tensor dq, Tensor dk, Tensor dv, Tensor q_angles, Tensor k_angles,"
    f" {_POSITIONS}, int[3] sizes, bool separate, {_HOW}) -> Tensor",
    _pack,
    lambda dq, dk, dv, q_angles, k_angles, start, cu_seqlens, sizes, separate, *_, **__: (
        triton.empty_joint(dk, sizes, separate)
    ),
)


def _make_operator(request: RopeRequest) -> Operator:
    spec = request.spec
    how = {
        "tensor_format": spec.tensor_format,
        "interleaved": spec.interleaved,
        "cp_size": spec.cp_size,
        "cp_rank": spec.cp_rank,
        "clamps": spec.clamps,
    }
    if request.operation == "qkv_forward":
        return _unpack_operator.given(sizes=request.sizes, separate=request.separate, **how)
    if request.operation == "qkv_backward":
        return _pack_operator.given(sizes=request.sizes, separate=request.separate, **how)
    return _rotate_operator.given(transposed=request.operation == "backward", **how)


TABLE: Table[RopeRequest] = Table(
    "rope", (triton.BACKEND, reference.BACKEND), describe=RopeRequest, operator=_make_operator
)
