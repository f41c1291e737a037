"""Code shared by all frameworks: recipes, formats, environment variables and the choice of backends."""

from . import absent, recipe

__all__ = ["recipe"]

absent.install_getters(__name__)
