"""What the extension says of libraries and of the machine: versions, and what it was not built with."""

from __future__ import annotations

import torch


def get_cudnn_version() -> int:
    """The number by which cuDNN calls its version, 91900 for 9.19.0; 0 where torch has none."""
    return torch.backends.cudnn.version() or 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """False: userbuffers over multicast memory are not there."""
    return False


def ubuf_built_with_mpi() -> bool:
    """False: userbuffers are not there."""
    return False
