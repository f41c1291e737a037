"""initialize_ub: the switch for communication that overlaps with products, accepted; collectives run unfused here.

Results are the same. A layer keeps its `ub_*` switches for inspection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ...common.checks import whole


class UserBufferQuantizationMode(Enum):
    """How activations would travel."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Checks its arguments and allocates nothing: no buffers are needed where nothing overlaps."""
    if len(shape) != 2:
        raise ValueError(f"shape={list(shape)}; give [tokens, hidden]")
    whole("tp_size", tp_size)
    for mode in quantization_modes or ():
        if not isinstance(mode, UserBufferQuantizationMode):
            raise TypeError(f"quantization_modes holds {mode!r}; give values of UserBufferQuantizationMode")


def destroy_ub() -> None:
    """Gives back what `initialize_ub` allocated: nothing."""
