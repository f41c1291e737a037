"""codes_t [K, M] = codes [M, K].T, contiguous, one byte an element: a copy that moves codes and changes none.

It takes no cast: codes of the transpose of values are the columnwise direction of a `QuantizeSpec`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from . import reference, triton
from .request import TransposeRequest

__all__ = ["TABLE", "TransposeRequest", "transposed_codes"]


def transposed_codes(codes: Tensor) -> Tensor:
    """[K, M] of codes [M, K]."""
    native = torch.compiler.is_compiling() or type(codes) is Tensor
    return TABLE.bound((codes.shape, codes.dtype, codes.device, codes.is_contiguous(), native))(codes)


def _results(codes: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


_operator = operator("transposed_codes(Tensor codes) -> Tensor", transposed_codes, _results)


def _operator_of(request: TransposeRequest) -> Operator:
    return _operator.given()


TABLE: Table[TransposeRequest] = Table(
    "transpose", (triton.BACKEND, reference.BACKEND), describe=TransposeRequest, operator=_operator_of
)
