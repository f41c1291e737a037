"""Does FP8 save time for a layer y [M, N] = x [M, K] @ w [N, K].T, its backward included?

What three products save grows with M N K, what quantizing x, w and dy in both directions costs with the number of
their elements, and every kernel that is launched costs something however small it is.
"""

from __future__ import annotations

from typing import NamedTuple


class _Rate(NamedTuple):
    """Microseconds: quantizing a million elements both ways, saved by a billion operations, launching kernels."""

    quantize: float
    saved: float
    launch: float


# Fitted on an H200 to the steps in benchmarks/results/cublaslt_h200.json, 128-8192 tokens of width 1024-8192: the
# difference from bfloat16 is met within 20 us or a fifth, and where its sign is missed little is lost: under 8 us.
_RATES = {
    "delayed": _Rate(1.04, 0.557, 7.4),
    "current": _Rate(1.51, 0.585, 12.2),
    "block": _Rate(1.13, 0.370, 22.0),
}


def fp8_refusal(m: int, n: int, k: int, kind: str) -> str | None:
    """Why a layer of these extents is faster in bfloat16 than in FP8, or None where FP8 pays.

    kind    "delayed", "current" or "block": how scales are found; ValueError for another
    The weight is taken to be quantized at every step, as without `is_first_microbatch`.
    """
    if kind not in _RATES:
        raise ValueError(f"kind={kind!r} has not been measured; choose one of {', '.join(_RATES)}")
    rate = _RATES[kind]
    elements = (m * k + n * k + m * n) / 1e6
    operations = 6 * m * n * k / 1e9
    cost, saved = rate.quantize * elements + rate.launch, rate.saved * operations
    if cost <= saved:
        return None
    return (
        f"quantizing for {m}x{k} @ {k}x{n} costs about {cost:.0f} us a step and FP8 products save {saved:.0f} us; "
        "a larger M amortizes it"
    )
