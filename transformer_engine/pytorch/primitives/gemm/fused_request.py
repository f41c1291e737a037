"""What follows a product in one library call: GELU, the gradient of GELU, or a cast to FP8; as data to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....common import dispatch
from ....common.dispatch import undisturbed
from ..operand import Operand
from . import request
from .request import Epilogue, GemmRequest, Layout

GELU = "gelu"
GELU_GRADIENT = "gelu_gradient"
CODES = "codes"
KINDS = frozenset({GELU, GELU_GRADIENT, CODES})


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

    @property
    def features(self) -> tuple[str, ...]:
        return (self.kind,)

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
        return described(*key_of(kind, a, b, epilogue, second, x, dtype))


def key_of(
    kind: str,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    second: bool,
    x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """What `described` makes the request of, gathered without building one."""
    lies = None if x is None else (x.shape, x.stride(), x.device)
    forced = None if undisturbed() else _forced()
    return kind, second, lies, dtype, forced, *request.key_of(a, b, epilogue)


def described(
    kind: str,
    second: bool,
    lies: tuple[Sequence[int], Sequence[int], torch.device] | None,
    dtype: torch.dtype | None,
    forced: str | None,
    *product: Any,
) -> FusedRequest:
    """The request of a key; ValueError where the extents or devices do not fit, or the result has a place already."""
    of_product = request.described(*product)
    if product[request.OUT] is not None:
        raise ValueError(
            "the result of an activation or a cast is allocated by the product; leave epilogue.out out"
        )
    if lies is None:
        return FusedRequest(kind, of_product, second, None, dtype, forced)
    shape, strides, _ = lies
    if tuple(shape) != (of_product.m, of_product.n):
        raise ValueError(f"x has shape {tuple(shape)}; it must be ({of_product.m}, {of_product.n})")
    return FusedRequest(kind, of_product, second, Layout.lying(shape, strides), dtype, forced)


def _forced() -> str | None:
    for operation in ("gemm", "activation", "quantize"):
        name = dispatch.forced(operation)
        if name is not None and name != "cublaslt":
            return f"use_backend({operation}={name!r}) is in force"
    return None
