"""What every framework shares: recipes, formats, environment variables, backend choice."""

from . import recipe

__all__ = ["recipe"]
