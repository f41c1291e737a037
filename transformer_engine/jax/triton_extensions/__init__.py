"""Triton kernels in JAX under the original's path: the permutation of tokens, and kernels as primitives."""

from ...common import absent
from . import permutation, utils

__all__ = ["permutation", "utils"]

__getattr__ = absent.getter(__name__)
