"""Looking at arrays while a program runs."""

from ...common import absent
from . import experimental

__all__ = ["experimental"]

absent.install_getter(__name__)
