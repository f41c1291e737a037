"""transformer_engine.pytorch.ops: base classes of fusible operations, and BasicLinear's functional passes."""

from __future__ import annotations

from ...common import absent
from .basic_linear import BasicLinear
from .op import BasicOperation, FusibleOperation

__all__ = ["BasicLinear", "BasicOperation", "FusibleOperation"]

absent.answer_in(__name__)
