"""Attention over sequences that are sharded along a mesh axis, built on single-device attention."""

from .parts import attention_in_parts
from .plan import ContextParallel, make_plan
from .ring import ring_attention

__all__ = ["ContextParallel", "attention_in_parts", "make_plan", "ring_attention"]
