"""GPU ms for a product that ends in GELU, its gradient or a cast to FP8, against the product and a separate kernel.

    python benchmarks/epilogues.py [--json FILE] [--only TEXT]

The products belong to an MLP on 8192 tokens, 4096 -> 14336 -> 4096. GPU ms is the median over calls whose launches
are all queued before the first runs, the L2 cache overwritten before each, the two ways in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from record import options, parser, select_cases, write

from transformer_engine.common.formats import E4M3, E5M2, FLOAT8, Element
from transformer_engine.pytorch.primitives.gemm import (
    Epilogue,
    composed,
    gemm,
    gemm_gelu,
    gemm_gelu_gradient,
    plain,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import Cast, QuantizeSpec, quantize
from transformer_engine_tools.bench.measure import measure_in_turns

TOKENS, HIDDEN, INNER = 8192, 4096, 14336
DTYPE = torch.bfloat16
RUNS = 20


class Case(NamedTuple):
    """One line: the library call, and the steps that it replaces."""

    name: str
    together: Callable[[], object]
    apart: Callable[[], object]


def main() -> None:
    chosen = options(parser(__doc__))
    rows = []
    print(f"{'case':44} {'together ms':>11} {'apart ms':>9} {'ratio':>6}")
    for case in select_cases((*plain_cases(), *quantized(False), *quantized(True)), chosen.only):
        joint, separate = measure_in_turns((case.together, case.apart), RUNS)
        rows.append(
            {
                "case": case.name,
                "together_ms": joint,
                "apart_ms": separate,
                "ratio": joint / separate,
            }
        )
        print(f"{case.name:44} {joint:11.4f} {separate:9.4f} {joint / separate:6.3f}", flush=True)
    write(chosen.json, cases=rows)


def plain_cases() -> Iterator[Case]:
    x, w, bias = plain(_random(TOKENS, HIDDEN)), plain(_random(INNER, HIDDEN)), _random(INNER)
    for saved, epilogue in (
        (True, Epilogue(DTYPE, bias)),
        (False, Epilogue(DTYPE, bias)),
        (True, Epilogue(DTYPE)),
    ):
        yield Case(
            f"bf16 fc1{'' if epilogue.bias is None else ' + bias'} + gelu, its input {'kept' if saved else 'dropped'}",
            functools.partial(gemm_gelu, x, w, epilogue, saved),
            functools.partial(composed.gelu, saved, x, w, epilogue),
        )
    dy, wide = plain(_random(TOKENS, HIDDEN)), _random(TOKENS, INNER)
    back, epilogue = plain(_random(HIDDEN, INNER).t()), Epilogue(DTYPE)
    yield Case(
        "bf16 fc2 input gradient * gelu'",
        functools.partial(gemm_gelu_gradient, dy, back, wide, epilogue),
        functools.partial(composed.gelu_gradient, False, dy, back, epilogue, wide),
    )


def quantized(exact: bool) -> Iterator[Case]:
    scale, record = torch.full((1,), 4.0, device="cuda"), torch.zeros(1, device="cuda")
    epilogue = Epilogue(DTYPE, exact=exact)
    tag = "exact" if exact else "fast"
    for name, element in (("fc1 -> E4M3", E4M3), ("fc2 input gradient -> E5M2", E5M2)):
        a, b = _codes(_random(TOKENS, HIDDEN), element), _codes(_random(INNER, HIDDEN), E4M3)
        cast = Cast(QuantizeSpec(FLOAT8, element), scale, record)
        yield Case(
            f"fp8 {tag} {name} + amax",
            functools.partial(gemm, a, b, epilogue, cast),
            functools.partial(composed.codes, True, a, b, epilogue, cast),
        )


def _codes(x: torch.Tensor, element: Element) -> Operand:
    tensor = quantize(x, QuantizeSpec(FLOAT8, element))
    assert tensor.codes is not None
    return Operand(tensor.codes, tensor.scale, FLOAT8)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


if __name__ == "__main__":
    main()
