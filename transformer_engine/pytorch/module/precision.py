"""Quantized or not: what the recipe asks for, unless NVTE_FP8_AUTO=1 and quantizing costs more than it saves."""

from __future__ import annotations

from typing import NamedTuple

from ...common import env
from ...common.dispatch import Backend, Table
from ...common.recipe import Recipe
from ..primitives.gemm.fp8_worth import fp8_refusal
from ..quantization.family import family_of


class PrecisionRequest(NamedTuple):
    """y [m, n] = x [m, k] @ w [n, k].T with its backward, how scales are found, and whether NVTE_FP8_AUTO asks."""

    m: int
    n: int
    k: int
    kind: str
    asked: bool


def _refuses_quantized(request: PrecisionRequest) -> str | None:
    return fp8_refusal(*request[:4]) if request.asked else None


def _refuses_high_precision(request: PrecisionRequest) -> str | None:
    reason = fp8_refusal(*request[:4])
    if reason is None:
        return "FP8 is faster for these extents"
    if request.asked:
        return None
    return f"the recipe asks for FP8, although {reason}; NVTE_FP8_AUTO=1 lets such a call run unquantized"


TABLE: Table[PrecisionRequest] = Table(
    "precision",
    (
        Backend("quantized", refuses=_refuses_quantized),
        Backend("high_precision", refuses=_refuses_high_precision),
    ),
    describe=PrecisionRequest,
)


def kind_of(recipe: Recipe) -> str | None:
    """How a recipe finds its scales, where the worth of it has been measured."""
    return family_of(recipe).measured_as


def quantizes(recipe: Recipe, m: int, n: int, k: int) -> bool:
    """Is a layer of these extents to be quantized under the recipe?"""
    kind = kind_of(recipe)
    return kind is None or TABLE.choose((m, n, k, kind, env.flag("NVTE_FP8_AUTO"))) == "quantized"
