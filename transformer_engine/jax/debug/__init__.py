"""Looking at arrays while a program runs."""

from . import experimental

__all__ = ["experimental"]
