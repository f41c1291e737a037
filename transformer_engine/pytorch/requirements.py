"""Imported first: says in one sentence what is missing, before another module trips over it."""

from ..common import frameworks

frameworks.demand(frameworks.PYTORCH)
