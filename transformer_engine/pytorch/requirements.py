"""Imported first: raises an error that names the missing package, before another module fails without it."""

from ..common import frameworks

frameworks.demand(frameworks.PYTORCH)
