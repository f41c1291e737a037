"""Choice between quantized and high-precision computation: by the recipe, by shapes, or by time with NVTE_FP8_AUTO=1.

A product y [M, N] = x [M, K] @ w [N, K].T whose shapes the format does not support runs in high precision, with a
warning. `runs_quantized` decides; the rule of a format is its quantizer's `unsupported_shape_reason` (`tensor/`):

| format | M, K and N must be multiples of | because |
| --- | --- | --- |
| FP8 with one scale per tensor, blocks of 128 | 1 | a last, smaller block has a scale of its own |
| MXFP8 | 32 | each matrix is quantized in blocks of 32 along both of its axes |
| NVFP4 | 16 | the same with blocks of 16 |
| hybrid quantizers | those of both formats | each direction has a format |
| custom quantizers | what they report; by default 1 | |

A fused MLP quantizes both products or none; GroupedLinear runs single groups unquantized (`grouped_products.py`).

For a layer y [M, N] = x [M, K] @ w [N, K].T and its backward pass, FP8 saves time in three
products, in proportion to M N K. Quantizing x, w and dy in both directions costs time in proportion
to their element count, and each kernel launch has a fixed cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...common import env
from ...common.dispatch import Backend, Table, always_depends, requirements
from ...common.recipe import Recipe
from ..quantization.family import find_family
from .linear_spec import ProductQuantizers, unsupported_product_reason

# {recipe scaling: microseconds per million elements quantized in both directions, saved per 10^9 operations, and for
# launches}. Fitted on an H200 to the steps in benchmarks/results/cublaslt_h200.json, 128-8192 tokens with width
# 1024-8192. The difference from bfloat16 is predicted within 20 us or a fifth. A wrong sign costs less than 8 us.
_RATES = {
    "delayed": (1.04, 0.557, 7.4),
    "current": (1.51, 0.585, 12.2),
    "block": (1.13, 0.370, 22.0),
}


def reason_against_fp8(m: int, n: int, k: int, kind: str) -> str | None:
    """Return why a layer with these sizes is faster in bfloat16 than in FP8, or None if FP8 is faster.

    The estimate assumes that the weight is quantized at every step, as without `is_first_microbatch`.

    Args:
        m: Input rows.
        n: Output features.
        k: Input features.
        kind: Recipe scaling: "delayed", "current" or "block".

    Raises:
        ValueError: The kind is unknown.
    """
    if kind not in _RATES:
        raise ValueError(f"kind={kind!r} has not been measured; choose one of {', '.join(_RATES)}")
    quantizing, saving, launching = _RATES[kind]
    elements = (m * k + n * k + m * n) / 1e6
    operations = 6 * m * n * k / 1e9
    cost, saved = quantizing * elements + launching, saving * operations
    if cost <= saved:
        return None
    return (
        f"quantizing for {m}x{k} @ {k}x{n} costs about {cost:.0f} us a step and FP8 products save {saved:.0f} us; "
        "a larger M amortizes it"
    )


class PrecisionRequest(NamedTuple):
    """Sizes of a layer y [m, n] = x [m, k] @ w [n, k].T, its scaling kind, and whether NVTE_FP8_AUTO is set."""

    m: int
    n: int
    k: int
    kind: str
    requested: bool


def _unsupported_high_precision(request: PrecisionRequest) -> str | None:
    reason = reason_against_fp8(*request[:4])
    if reason is None:
        return "FP8 is faster for these extents"
    if request.requested:
        return None
    return f"the recipe asks for FP8, although {reason}; NVTE_FP8_AUTO=1 lets such a call run unquantized"


TABLE: Table[PrecisionRequest] = Table(
    "precision",
    (
        Backend(
            "quantized",
            unsupported_reason=lambda request: (
                reason_against_fp8(*request[:4])
                if request.requested and not requirements.batch_invariant
                else None
            ),
        ),
        Backend(
            "high_precision",
            unsupported_reason=_unsupported_high_precision,
            batch_dependent=always_depends("by a precision that is chosen by their number"),
        ),
    ),
    describe=PrecisionRequest,
)


def quantizes(recipe: Recipe, m: int, n: int, k: int) -> bool:
    """Return whether a layer with these sizes is quantized under the recipe; only NVTE_FP8_AUTO=1 can prevent it."""
    kind = find_family(recipe).measured_as
    return kind is None or TABLE.choose((m, n, k, kind, env.flag("NVTE_FP8_AUTO"))) == "quantized"


def estimates(device: torch.device, traced: bool, quantized_weight: bool) -> bool:
    """Whether NVTE_FP8_AUTO applies to a call: on a GPU, without a quantized weight and without a tracing compiler."""
    return device.type == "cuda" and not traced and not quantized_weight


def runs_quantized(
    product: ProductQuantizers,
    extents: tuple[int, int, int],
    warn: Callable[[str], object],
    recipe: Recipe | None = None,
) -> bool:
    """Return whether a product in a module or in `te.ops` is quantized in a call.

    Args:
        product: The recipe's quantizers.
        extents: (m, k, n) in y [m, n] = x [m, k] @ w [n, k].T.
        warn: Called with the reason if the format does not support the shapes.
        recipe: The recipe, if NVTE_FP8_AUTO applies to the call; otherwise None.
    """
    m, k, n = extents
    reason = unsupported_product_reason(product.operands, m, k, n)
    if reason is not None:
        warn(reason)
        return False
    return recipe is None or quantizes(recipe, m, n, k)
