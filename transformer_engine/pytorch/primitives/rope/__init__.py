"""y = x rotated in pairs of features by an angle that grows with the token's position, and its gradient.

Su et al., RoFormer (2021). `angles` is float32 [positions, rotated features]; features beyond the rotated
ones pass through. `check_rotation` is for whoever calls from outside: what is called here is trusted, but a token
whose position has no angle becomes NaN (RopeSpec.clamps). A backend's `run` takes the name of one of the two
operations and returns the function that computes it.
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .checks import check_rotation as check_rotation
from .checks import reaches_lengths as reaches_lengths
from .request import Positions, RopeRequest, RopeSpec

TABLE: Table[RopeRequest] = Table("rope", (triton.BACKEND, reference.BACKEND))


def rope_forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """y = x * cos(a) + pair(x) * sin(a), in float32, returned in x's dtype; x as spec.tensor_format says."""
    return TABLE.select(_request(x, spec)).run("forward")(x, angles, positions, spec)


def rope_backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """dx = dy * cos(a) - pair(dy * sin(a)): the transposed rotation, in float32, returned in dy's dtype."""
    return TABLE.select(_request(dy, spec)).run("backward")(dy, angles, positions, spec)


def rope_qkv_forward(
    qkv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [.., g * n, d], k [.., g, d], v [.., g, dv]) of qkv [.., g, n * d + d + dv], q and k rotated; contiguous.

    sizes = (n * d, d, dv) is how a group's features split; the leading axes are those of spec.tensor_format.
    """
    _check_sizes(qkv.shape[-1], sizes)
    run = TABLE.select(_request(qkv, spec)).run("qkv_forward")
    return run(qkv, q_angles, k_angles, positions, sizes, spec)


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_angles: Tensor,
    k_angles: Tensor,
    positions: Positions,
    sizes: tuple[int, int, int],
    spec: RopeSpec,
) -> Tensor:
    """dqkv [.., g, n * d + d + dv] from the gradients of what rope_qkv_forward returned; contiguous."""
    if (dq.shape[-2] * dq.shape[-1], dk.shape[-1], dv.shape[-1]) != (dk.shape[-2] * sizes[0], *sizes[1:]):
        raise ValueError(
            f"gradients {list(dq.shape)}, {list(dk.shape)}, {list(dv.shape)} do not fit the split {list(sizes)}; "
            "give those of what rope_qkv_forward returned"
        )
    run = TABLE.select(_request(dk, spec)).run("qkv_backward")
    return run(dq, dk, dv, q_angles, k_angles, positions, sizes, spec)


def _check_sizes(width: int, sizes: tuple[int, int, int]) -> None:
    if sum(sizes) != width:
        raise ValueError(
            f"the split {list(sizes)} does not add up to the {width} features of a group; give n * d, d, dv"
        )
    if sizes[1] < 1 or sizes[0] % sizes[1]:
        raise ValueError(
            f"the query part {sizes[0]} is not a multiple of the key part {sizes[1]}; split by heads"
        )


def _request(x: Tensor, spec: RopeSpec) -> RopeRequest:
    return RopeRequest(spec, tuple(x.shape), x.dtype, x.device)
