"""Attention of sequences that are laid over the devices of a mesh axis, over the attention of one device."""

from .plan import ContextParallel, plan_of
from .ring import ring_attention

__all__ = ["ContextParallel", "plan_of", "ring_attention"]
