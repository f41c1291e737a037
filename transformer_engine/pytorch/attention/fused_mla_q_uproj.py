"""Alias of transformer_engine.pytorch.attention.mla_projection."""

from .mla_projection import FusedMLAQUpProjFunction, FusedMLAQUpProjRopeQuant

__all__ = ["FusedMLAQUpProjFunction", "FusedMLAQUpProjRopeQuant"]
