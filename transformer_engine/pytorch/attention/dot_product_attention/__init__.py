"""Attention of given queries, keys and values: request, choice of a backend, backends."""

from ...primitives.attention.layout import get_qkv_layout
from . import context_parallel as context_parallel
from .dot_product_attention import DotProductAttention, _attention_backends
