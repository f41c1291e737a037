"""Compile the grouped kernels for sm80 to sm100, without a GPU, and print facts about their PTX as JSON.

By default, sm89 has only the products of codes, whose tiles its small shared memory limits, and sm100 has one cast;
`--all` compiles every launch for them too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.compile_cases import compile_ptx, count
from transformer_engine.common.formats import E4M3
from transformer_engine.common.kernels import (
    grouped_block_cast,
    grouped_cast,
    grouped_gemm,
)
from transformer_engine.common.kernels.launch import Launch

TOTAL, N, K, GROUPS = 4096, 512, 1024, 16
SHARED = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # bytes that one program may have
HALF, CODES, GRADIENTS, SCALES = "*bf16", "*fp8e4nv", "*fp8e5", "*fp32"
INDICES, ADDRESSES = "*i32", "*i64"
LEFT_OUT = {
    89: ("columns-plain",),
    100: ("columns-plain", "cast-rows", "cast-matrices", "cast-squares", "cast-maximum"),
}


def products(shared: int, quantized: bool) -> Iterator[tuple[str, Launch, dict[str, str | None]]]:
    """(name, record, pointer types; None: that argument is absent)."""
    for name, scaling in (("plain", 0), ("tensor", 1), ("block", 2))[: 3 if quantized else 1]:
        exact = name == "tensor"
        a, b = (GRADIENTS, CODES) if exact else (CODES, CODES) if scaling else (HALF, HALF)
        scale = SCALES if scaling else None
        rows = {
            "a": a,
            "b": b,
            "table": None if scaling else ADDRESSES,
            "scale_a": scale,
            "scale_b": scale,
        }
        rows |= {"bias": None, "layout": INDICES, "out": HALF}
        options = {"scaling": scaling, "exact": exact, "shared_memory": shared}
        product = grouped_gemm.product_of_rows(
            TOTAL, N, K, GROUPS, by_address=not scaling, **options
        )
        yield f"rows-{name}", product, rows
        columns = {"a": a, "b": b, "scale_a": scale, "scale_b": scale, "layout": INDICES}
        columns |= {"table": ADDRESSES, "out": SCALES}
        record = grouped_gemm.product_of_columns(
            N, K, GROUPS, accumulates=True, by_address=True, **options
        )
        yield f"columns-{name}", record, columns


def casts() -> Iterator[tuple[str, Launch, dict[str, str | None]]]:
    pointers = {"x": HALF, "table": None, "layout": INDICES, "multiplier": SCALES, "amax": SCALES}
    pointers |= {"codes": CODES, "codes_t": CODES, "scale": SCALES}
    steps = (False, 0.0, True, True)
    rows = grouped_cast.cast((TOTAL, K), GROUPS, True, E4M3, 3, 0, *steps, records=True)
    yield "cast-rows", rows, pointers
    matrices = pointers | {"table": ADDRESSES, "layout": None, "multiplier": None}
    stack = grouped_cast.cast((N, K), GROUPS, False, E4M3, 0, 0, *steps, records=False)
    yield "cast-matrices", stack, matrices
    scales = (GROUPS, E4M3, True, 0.0, 3e38, True, True)
    blocks = {"x": HALF, "table": None, "layout": INDICES, "codes": CODES, "scale": SCALES}
    blocks |= {"codes_t": CODES, "scale_t": SCALES}
    yield "cast-row-blocks", grouped_block_cast.row_blocks((TOTAL, K), *scales), blocks
    squares = blocks | {"table": ADDRESSES, "layout": None}
    yield "cast-squares", grouped_block_cast.square_blocks((N, K), *scales), squares
    measured = {"x": HALF, "table": None, "layout": INDICES, "amax": SCALES}
    yield "cast-maximum", grouped_cast.maximum((TOTAL, K), GROUPS, True), measured


def main() -> None:
    facts = {}
    for capability, shared in SHARED.items():
        cases = list(products(shared, capability >= 89)) + (
            list(casts()) if capability >= 90 else []
        )
        if "--all" not in sys.argv:
            cases = [case for case in cases if case[0] not in LEFT_OUT.get(capability, ())]
        for name, record, pointers in cases:
            ptx, used = compile_ptx(record, pointers, capability)
            facts[f"sm{capability} {name}"] = {
                "fits": used <= shared,
                "wgmma": count(r"wgmma\.mma_async", ptx),
                "mma": count(r"\bmma\.sync", ptx),
                "narrow": count(r"\b[ls][dt]\.global\S*\.b(8|16)\b", ptx),
                "double": count(r"\.f64", ptx),
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
