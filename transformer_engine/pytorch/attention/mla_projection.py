"""FusedMLAQUpProjRopeQuant: the up projection, rotation and cast of latent attention's queries in one kernel."""

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
