"""Attention of given queries, keys and values: request, choice of a backend, backends."""

from .dot_product_attention import DotProductAttention, _attention_backends
from .layout import get_qkv_layout
