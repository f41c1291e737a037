"""Array inspection while a program runs."""

from ....common import absent
from .inspect import inspect_array, load_array_dump

__all__ = ["inspect_array", "load_array_dump"]

absent.install_getter(__name__)
