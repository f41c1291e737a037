"""Alias for callers of the original: the attention in plain operations as a module; others are backends of a table."""

from .....common import absent
from ..unfused import UnfusedDotProductAttention as UnfusedDotProductAttention

__getattr__ = absent.getter(__name__)
