"""Triton kernels as JAX primitives under NVIDIA's path: `call(kernel, *arrays)`."""

from ...common import absent
from ..primitives.kernels import Kernel, call
from ..primitives.launching import kernels_unsupported_reason

__all__ = ["Kernel", "call", "kernels_unsupported_reason"]

absent.install_getter(__name__)
