"""Triton kernels in JAX under NVIDIA's path: token permutation, and kernels as primitives."""

from ...common import absent
from . import permutation, utils

__all__ = ["permutation", "utils"]

absent.install_getter(__name__)
