"""The implementations of attention; `choose.TABLE` orders them."""

from .unfused import UnfusedDotProductAttention as UnfusedDotProductAttention
