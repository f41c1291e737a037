"""Attention of sequences that are laid over the devices of a mesh axis, over the attention of one device."""

from .parts import attention_in_parts
from .plan import ContextParallel, plan_of
from .ring import ring_attention

__all__ = ["ContextParallel", "attention_in_parts", "plan_of", "ring_attention"]
