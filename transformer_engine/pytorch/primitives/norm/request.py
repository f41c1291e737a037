"""What a backend of a normalization is told before it says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..quantize import CastRequest, QuantizeSpec
from ..quantize.fused_codes import cast_request

Lies = tuple["tuple[int, ...]", torch.dtype]  # strides and dtype


class NormRequest(NamedTuple):
    """One call on x [rows, width]; operation is the name of the public function that was called.

    eps       forward only
    dy, add   how the gradients lie that a backward reads
    """

    operation: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    zero_centered: bool
    eps: float = 0.0
    cast: CastRequest | None = None
    dy: Lies | None = None
    add: Lies | None = None

    @property
    def centered(self) -> bool:
        """Is the mean subtracted?"""
        return self.operation.startswith("layernorm")


def request_of(
    operation: str,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    zero_centered: bool,
    eps: float = 0.0,
    dy: Lies | None = None,
    add: Lies | None = None,
    spec: QuantizeSpec | None = None,
    given: bool = False,
    records: bool = False,
) -> NormRequest:
    """The request that a call's key stands for; spec, given and records are those of its cast."""
    cast = cast_request(shape, dtype, device, spec, given, records)
    facts = (operation, shape, strides, dtype, weight_dtype, device, zero_centered, eps)
    return NormRequest(*facts, cast, dy, add)
