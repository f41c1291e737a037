"""FusedMLAQUpProjRopeQuant: the up projection, rotation and cast of latent attention's queries in one kernel."""

from __future__ import annotations

from typing import Any

from torch import nn


class FusedMLAQUpProjRopeQuant(nn.Module):
    """A module that callers of the original ask is_supported() about before they make one; it is on no device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "FusedMLAQUpProjRopeQuant has no kernel here, is_supported() is False; use Linear, "
            "apply_rotary_pos_emb and a quantizer"
        )

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        """False: the three steps run one by one."""
        return False
