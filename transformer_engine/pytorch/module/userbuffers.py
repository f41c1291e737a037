"""initialize_ub and destroy_ub: accepted for communication that overlaps with matrix products; nothing overlaps here.

Results are the same without overlap. Layers keep their `ub_*` flags as attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ...common.numbers import to_int
from ..runtime.warn_once import warn_once


class UserBufferQuantizationMode(Enum):
    """Data type in which activations would be communicated."""

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
    """Check the arguments and warn once that nothing is allocated: collectives are not overlapped with products.

    Args:
        shape: [tokens, hidden] of the largest activation.
        tp_size: Size of the tensor-parallel group.
        use_fp8: No effect.
        quantization_modes: Data types in which activations would be communicated.
        dtype: No effect.
        ub_cfgs: No effect.
        bootstrap_backend: No effect.
        with_cublasmp: No effect.

    Raises:
        TypeError: A quantization mode is not a UserBufferQuantizationMode, or tp_size is not a whole number.
        ValueError: The shape is not [tokens, hidden], or tp_size is below 1.
    """
    if len(shape) != 2:
        raise ValueError(f"shape={list(shape)}; give [tokens, hidden]")
    to_int("tp_size", tp_size, 1)
    for mode in quantization_modes or ():
        if not isinstance(mode, UserBufferQuantizationMode):
            raise TypeError(f"quantization_modes holds {mode!r}; give values of UserBufferQuantizationMode")
    warn_once(
        "initialize_ub",
        "initialize_ub has no effect: collectives are not overlapped with matrix products here, and results are the "
        "same without overlap. The call can be left out",
    )


def destroy_ub() -> None:
    """Do nothing: `initialize_ub` allocates nothing."""
