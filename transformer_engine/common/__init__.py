"""What every framework shares: recipes, formats, environment variables, backend choice."""

from . import absent, recipe

__all__ = ["recipe"]

absent.answer_in(__name__)
