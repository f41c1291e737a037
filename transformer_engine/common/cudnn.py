"""cuDNN versions: the minimum of release 2.20 of NVIDIA's engine, and the numbers in a version."""

from __future__ import annotations

import sys
from typing import Any

MIN_CUDNN_VERSION = (9, 12, 0)


def decode_cudnn_version(version: int) -> tuple[int, int, int]:
    """Split a version as cuDNN counts it into major, minor and patch number, for example 91200 is 9.12.0.

    Args:
        version: `cudnnGetVersion()` result. Versions before 9 have four digits.
    """
    scale = 10000 if version >= 90000 else 1000
    major, rest = divmod(int(version), scale)
    minor, patch = divmod(rest, 100)
    return major, minor, patch


def check_cudnn_version(version: int | None = None) -> None:
    """Check that cuDNN has at least MIN_CUDNN_VERSION. This package does not require it, because other backends exist.

    Args:
        version: Version to check; by default the imported PyTorch's. Without cuDNN nothing is checked.

    Raises:
        RuntimeError: The version is older.
    """
    if version is None:
        torch: Any = sys.modules.get("torch")
        version = None if torch is None else torch.backends.cudnn.version()
    if version is None:
        return
    decoded = decode_cudnn_version(version)
    if decoded < MIN_CUDNN_VERSION:
        least, installed = (".".join(map(str, numbers)) for numbers in (MIN_CUDNN_VERSION, decoded))
        raise RuntimeError(
            f"cuDNN is {installed}, the API of release 2.20 demands {least}; update cuDNN"
        )
