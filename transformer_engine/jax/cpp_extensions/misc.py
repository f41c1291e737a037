"""What the machine and a kernel can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.checks import member, whole
from ..checks import check_dtype
from ..platform import compute_capability, library_version, xla_flag
from ..primitives.attention.enums import AttnSoftmaxType
from ..softmax import SoftmaxFusionType

__all__ = [
    "get_cudnn_version",
    "get_min_device_compute_capability",
    "get_xla_flag",
    "is_softmax_kernel_available",
]

_THREADS, _WARP = 128, 32


def get_xla_flag(flag: str, default: Any = None, cast: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a flag in XLA_FLAGS as a Python value: a bool, an int or a float where it is one.

    Args:
        flag: Name of the flag, with or without its leading dashes.
        default: Returned if the flag is not set.
        cast: Converts the text of the value instead.
    """
    found = xla_flag(flag.lstrip("-"))
    if found is None:
        return default
    if cast is not None:
        return cast(found)
    if found.lower() in ("true", "false"):
        return found.lower() == "true"
    for kind in (int, float):
        try:
            return kind(found)
        except ValueError:
            continue
    return found


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that XLA uses; zeros without a GPU."""
    number = library_version("cudnn")
    return number // 10000, number // 100 % 100, number % 100


def get_min_device_compute_capability() -> int:
    """Ten times the least compute capability of this process's GPUs; 90 on a CPU."""
    return compute_capability()


def is_softmax_kernel_available(
    fusion_type: SoftmaxFusionType,
    softmax_type: AttnSoftmaxType,
    batch: int,
    heads: int,
    q_seqlen: int,
    k_seqlen: int,
    dtype: Any,
) -> bool:
    """Would a kernel of 128 threads a block, two rows a warp up to 128 keys and one beyond, take these scores?"""
    member("fusion_type", fusion_type, SoftmaxFusionType)
    member("softmax_type", softmax_type, AttnSoftmaxType)
    for name, extent in (("batch", batch), ("heads", heads), ("q_seqlen", q_seqlen), ("k_seqlen", k_seqlen)):
        whole(name, extent)
    if softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX or check_dtype("dtype", dtype).itemsize != 2:
        return False
    if not 16 <= k_seqlen <= 16384 or q_seqlen % 4 or (batch * heads) % 4:
        return False
    padded = 1 << (k_seqlen - 1).bit_length()
    rows = _THREADS // min(padded, _WARP) * (2 if padded <= 128 else 1)
    return q_seqlen % rows == 0
