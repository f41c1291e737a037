"""Names of the original's fused grouped MLPs, which need a compute capability 10 GPU and are never inserted here.

A grouped MLP from `GroupedLinear`, a scaled activation and `GroupedLinear` runs as one chain pass without them.
"""

from __future__ import annotations

from ..pass_operation import PassFusedOperation


class GroupedMLP_CuTeGEMMGLU(PassFusedOperation):
    """GroupedLinear, a scaled gated activation and GroupedLinear."""

    @classmethod
    def is_supported(cls) -> bool:
        """Return False: the original's kernel does not exist in this package."""
        return False


class GroupedMLP_CuTeGEMMUnary(PassFusedOperation):
    """GroupedLinear, ScaledSReLU and GroupedLinear."""

    @classmethod
    def is_supported(cls) -> bool:
        """Return False: the original's kernel does not exist in this package."""
        return False


def _cudnn_frontend_version_supported() -> bool:
    return False


def _cudnn_frontend_supports_grouped_gemm_srelu() -> bool:
    return False


def _cudnn_frontend_supports_grouped_gemm_situglu() -> bool:
    return False
