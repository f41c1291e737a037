"""The up projection, rotation and cast of latent attention's queries: the original's names, which are unsupported.

The original's kernel needs a GPU of compute capability 10 and a library of that vendor. Clients test `is_supported` and
take their separate steps otherwise.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class FusedMLAQUpProjRopeQuant(nn.Module):
    """A module whose is_supported() callers of the original test before they create one; it is supported nowhere."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "FusedMLAQUpProjRopeQuant has no kernel here, is_supported() is False; use Linear, "
            "apply_rotary_pos_emb and a quantizer"
        )

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        """Return False: the three steps run one by one."""
        return False


class FusedMLAQUpProjFunction:
    """The differentiable form of `FusedMLAQUpProjRopeQuant`; it is supported nowhere."""

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        """Return False: the steps run one by one."""
        return False

    @staticmethod
    def apply(*_: Any, **__: Any) -> Any:
        """Raise NotImplementedError with the replacement."""
        raise NotImplementedError(
            "FusedMLAQUpProjFunction has no kernel here, is_supported() is False; use te.RMSNorm, te.Linear, "
            "apply_rotary_pos_emb and a quantizer"
        )
