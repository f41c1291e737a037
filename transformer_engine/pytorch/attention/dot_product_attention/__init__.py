"""Attention of queries, keys and values: arguments, backend choice, and backends."""

from ...primitives.attention.layout import get_qkv_layout
from . import context_parallel as context_parallel
from .dot_product_attention import DotProductAttention, _attention_backends

__all__ = [
    "DotProductAttention",
    "_attention_backends",
    "context_parallel",
    "get_qkv_layout",
]
