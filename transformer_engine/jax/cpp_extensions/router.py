"""Token routing to experts under NVIDIA's path; XLA compiles it."""

from ...common import absent
from ..router import (
    RoutingMapFormat,
    ScoreFunction,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

__all__ = [
    "RoutingMapFormat",
    "ScoreFunction",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

absent.install_getter(__name__)
