"""Operations that a Sequential fuses: the base class only, for callers that look for it. See docs/support.md."""

from __future__ import annotations

from typing import Any

from .op import BasicOperation, FusibleOperation

__all__ = ["BasicOperation", "FusibleOperation"]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"transformer_engine.pytorch.ops.{name} is not implemented in this release: use the layers of "
        "transformer_engine.pytorch, whose norms, products and activations are fused already"
    )
