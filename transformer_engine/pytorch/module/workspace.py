"""get_workspace: scratch memory for products, for callers that hand it on; products here plan their own."""

from __future__ import annotations

import torch

from ...common.memory import Memory
from ..primitives.gemm.cublaslt_library import WORKSPACE_BYTES
from ..runtime.device import canonical_device

_cublas_workspace = None  # where callers of the original keep scratch memory of their own


def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


_made: Memory[torch.device, torch.Tensor] = Memory(_empty, 8)


def get_workspace() -> torch.Tensor:
    """uint8 [bytes that a product of cuBLASLt may use], one for the current device."""
    return _made[canonical_device("cuda")]
