"""Inspection of arrays while a program runs."""

from ....common import absent
from .inspect import inspect_array, load_array_dump

__all__ = ["inspect_array", "load_array_dump"]

__getattr__ = absent.getter(__name__)
