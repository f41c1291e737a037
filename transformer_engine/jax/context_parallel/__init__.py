"""Attention over sequences that are sharded along a mesh axis, built on single-device attention."""

from .parts import attention_in_parts
from .plan import ContextParallel, plan_of
from .ring import ring_attention

__all__ = ["ContextParallel", "attention_in_parts", "plan_of", "ring_attention"]
