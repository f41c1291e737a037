"""Looking at arrays while a program runs."""

from ...common import absent
from . import experimental

__all__ = ["experimental"]

__getattr__ = absent.getter(__name__)
