"""Alias for callers of the original: the attention in plain operations as a module; others are backends of a table."""

from ..unfused import UnfusedDotProductAttention as UnfusedDotProductAttention
