"""y = x rotated in pairs of features by an angle that grows with the token's position, and its gradient.

Su et al., RoFormer (2021). `angles` is float32 [positions, rotated features]; features beyond the rotated
ones pass through. A backend's `run` takes the name of one of the two operations and returns the function that
computes it.
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .request import Positions, RopeRequest, RopeSpec

TABLE: Table[RopeRequest] = Table("rope", (triton.BACKEND, reference.BACKEND))


def rope_forward(x: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """y = x * cos(a) + pair(x) * sin(a), in float32, returned in x's dtype; x as spec.tensor_format says."""
    return TABLE.select(_request(x, spec)).run("forward")(x, angles, positions, spec)


def rope_backward(dy: Tensor, angles: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """dx = dy * cos(a) - pair(dy * sin(a)): the transposed rotation, in float32, returned in dy's dtype."""
    return TABLE.select(_request(dy, spec)).run("backward")(dy, angles, positions, spec)


def _request(x: Tensor, spec: RopeSpec) -> RopeRequest:
    return RopeRequest(spec, tuple(x.shape), x.dtype, x.device)
