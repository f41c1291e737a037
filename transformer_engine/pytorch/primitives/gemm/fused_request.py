"""What follows a product in one library call: GELU, the gradient of GELU, or a cast to FP8; as data to judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....common import dispatch
from ..operand import Operand
from .request import Epilogue, GemmRequest, Layout

GELU = "gelu"
GELU_GRADIENT = "gelu_gradient"
CODES = "codes"


@dataclass(frozen=True)
class FusedRequest:
    """A product, and what becomes of it.

    kind      GELU, GELU_GRADIENT or CODES
    product   of the operands; its dtype is that of the result, for CODES the nominal one
    second    GELU: the activation's input is returned too; CODES: the maximum of the absolute values is recorded
    x         how the activation's input lies in memory, GELU_GRADIENT only
    dtype     of the activation's input, of the codes; None for GELU
    forced    why the parts have to be computed apart: somebody has chosen a backend for one of them
    """

    kind: str
    product: GemmRequest
    second: bool
    x: Layout | None
    dtype: torch.dtype | None
    forced: str | None

    @classmethod
    def of(
        cls,
        kind: str,
        a: Operand,
        b: Operand,
        epilogue: Epilogue,
        second: bool,
        x: Tensor | None,
        dtype: torch.dtype | None,
    ) -> FusedRequest:
        """What backends judge of this product and what follows it."""
        product = GemmRequest.of(a, b, epilogue)
        return cls(kind, product, second, None if x is None else Layout.of(x), dtype, _forced())


def _forced() -> str | None:
    for operation in ("gemm", "activation", "quantize"):
        name = dispatch._forced.get(operation)
        if name is not None and name != "cublaslt":
            return f"use_backend({operation}={name!r}) is in force"
    return None
