"""Alias of names that callers of the original import from here."""

from .graph import make_weak_ref

__all__ = ["make_weak_ref"]
