"""Operations that a Sequential fuses: the base class only, for callers that look for it. See docs/support.md."""

from __future__ import annotations

from .op import BasicOperation, FusibleOperation

__all__ = ["BasicOperation", "FusibleOperation"]
