"""Every name of transformer_engine_torch, with the wrappers that take names instead of numbers in place of two."""

import transformer_engine_torch as _extension
from transformer_engine_torch import *  # noqa: F403

from .fused_attn import fused_attn_bwd, fused_attn_fwd

__all__ = []
__all__ += _extension.__all__
