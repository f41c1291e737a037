"""Whether this machine computes each kind of format, under the names of the original.

The list is written out for type checkers. `is_<kind>_available(return_reason=False)` is part of the public API, and
`check_<kind>_support()` returns (available, reason).
"""

from . import families as _rows  # noqa: F401 - registers the kinds
from .support import availability, check

__all__ = [
    "check_bf16_support",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]

is_bf16_available = availability("bf16")
is_fp8_available = availability("fp8")
is_fp8_block_scaling_available = availability("fp8_block_scaling")
is_mxfp8_available = availability("mxfp8")
is_nvfp4_available = availability("nvfp4")

check_bf16_support = check("bf16")
check_fp8_support = check("fp8")
check_fp8_block_scaling_support = check("fp8_block_scaling")
check_mxfp8_support = check("mxfp8")
check_nvfp4_support = check("nvfp4")


class FormatChecks:
    """The checks as static methods of `FP8GlobalStateManager`."""

    is_bf16_available = staticmethod(check_bf16_support)
    is_fp8_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
