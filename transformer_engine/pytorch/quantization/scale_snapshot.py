"""scale_snapshot(scale): the scale copy that a compiled graph saves for its backward pass.

A partitioner that recomputes a cast in the backward pass would save `scale` itself, which changes when the
autocast block in between ends. It never recomputes a registered operator, and so saves this copy, unless the
operator is within torch.utils.checkpoint, which marks each node for recomputation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.utils.checkpoint import CheckpointPolicy

from ..runtime.tracing import hide_from_selective_checkpoints
from .compiled_runs import is_recomputed, replay_scale


@torch.library.custom_op("transformer_engine::copied_scale", mutates_args=())
def _copy_scale(scale: torch.Tensor) -> torch.Tensor:
    """Copy the present scale."""
    return scale.clone()


@_copy_scale.register_fake
def _copy_scale_fake(scale):
    return torch.empty_like(scale)


# A composite operator: its implementation runs during tracing, where it can change the mark.
_library = get_library_allowing_overwrite("transformer_engine", "scale_snapshot")
_library.define("scale_snapshot(Tensor scale) -> Tensor")
scale_snapshot = torch.ops.transformer_engine.scale_snapshot.default


def _scale_snapshot(scale: Tensor) -> Tensor:
    """Copy the present scale, which a compiled graph saves."""
    meta = torch.fx.traceback.current_meta
    before = meta.get("recompute")
    with hide_from_selective_checkpoints() as hidden:
        if not hidden and before is None:
            return _copy_scale(scale)
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
        try:
            return _copy_scale(scale)
        finally:
            meta["recompute"] = before
            if before is None:
                del meta["recompute"]


def compiled_scale(state: Any) -> Tensor:
    """The scale of a delayed-scaling state for a graph that is being traced, which later updates leave alone.

    In a recomputed function, the graph reads the scale of the first run in both runs.
    """
    if is_recomputed():
        return replay_scale(state.scale_in_place, state.amax_history, state.key)
    return scale_snapshot(state.scale_in_place)


_library.impl("scale_snapshot", _scale_snapshot, "CompositeImplicitAutograd")
