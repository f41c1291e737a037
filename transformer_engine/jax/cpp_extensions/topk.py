"""Alias of transformer_engine.jax.primitives.topk."""

from ..primitives.topk import topk

__all__ = ["topk"]
