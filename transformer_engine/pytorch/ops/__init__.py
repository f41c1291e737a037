"""Operations that a Sequential fuses: the base class, and the passes of a product, for callers that look for them."""

from __future__ import annotations

from .basic_linear import BasicLinear
from .op import BasicOperation, FusibleOperation

__all__ = ["BasicLinear", "BasicOperation", "FusibleOperation"]
