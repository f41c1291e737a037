"""Quantization specifications, requests and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import E2M1, E4M3, E5M2, Element
from ....common.quantize_spec import QuantizeSpec

# Code dtypes by element name; two E2M1 codes share a byte.
CODE_DTYPES = {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2, E2M1.name: torch.uint8}


def torch_dtype(element: Element) -> torch.dtype:
    """Return the torch dtype for an element's codes (E2M1: uint8, two codes per byte)."""
    return CODE_DTYPES[element.name]


class Cast(NamedTuple):
    """Quantization for an operation's result: from `Quantizer.cast`, passed to the operation.

    Attributes:
        spec: Target format and scaling.
        multiplier: FLOAT8: float32 [1], value multiplier; None: computed from the values.
        record: With a multiplier: float32 [1], which becomes the maximum of itself and the absolute maximum.
    """

    spec: QuantizeSpec
    multiplier: Tensor | None = None
    record: Tensor | None = None


class CastRequest(NamedTuple):
    """The cast properties by which a backend is chosen.

    Attributes:
        spec: Target format and scaling.
        given: Whether the multiplier is given.
        records: Whether a tensor for the maximum is given.
        inside: Whether the kernel that computes the values may also compute the codes. They equal
            the codes from the backend that would quantize the values.
    """

    spec: QuantizeSpec
    given: bool
    records: bool
    inside: bool


class Quantized(NamedTuple):
    """The codes of a matrix [M, K]; None for directions that were not requested.

    Attributes:
        codes: [M, K] float8; NVFP4: uint8 [M, K / 2].
        scale: Scales as in `Operand`, for [M, K].
        codes_t: [K, M] float8; NVFP4: uint8 [K, M / 2].
        scale_t: Scales as in `Operand`, for the transposed matrix [K, M].
        amax: FLOAT8 and NVFP4: float32 [1], the absolute maximum that determined the rowwise scale; [M] if the format
            has one scale per row.
        amax_t: NVFP4: float32 [1], the same for the columnwise direction, after a Hadamard transform.
    """

    codes: Tensor | None = None
    scale: Tensor | None = None
    codes_t: Tensor | None = None
    scale_t: Tensor | None = None
    amax: Tensor | None = None
    amax_t: Tensor | None = None


# Spec features, which a backend declares.
OPTIONS = ("power_of_two", "two_dimensional", "hadamard", "stochastic", "four_over_six", "tiled")


@dataclass(frozen=True)
class QuantizeRequest:
    """The properties by which a backend is chosen: the spec and the matrix's shape, dtype and device.

    Attributes:
        spec: How the matrix is quantized.
        shape: Matrix shape.
        dtype: Matrix dtype.
        device: Matrix device.
        multiplier_given: Whether the caller passes a multiplier.
        amax_given: Whether the caller passes the absolute maximum.
    """

    spec: QuantizeSpec
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    multiplier_given: bool = False
    amax_given: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(option for option in OPTIONS if getattr(self.spec, option))
