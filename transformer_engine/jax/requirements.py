"""Imported first: reports missing dependencies in one sentence before another module fails to import them."""

from ..common import frameworks

frameworks.demand(frameworks.JAX)
