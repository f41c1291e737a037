"""Compile the kernels that measure quantization, without a GPU, and print their PTX sizes as JSON.

By default, sm100 has only Blackwell's block formats; `--all` compiles every scaling for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from tests.kernels.compile_cases import compile_ptx
from transformer_engine.common.kernels import statistics
from transformer_engine.common.kernels.launch import Launch

SCALED = {
    "none": (statistics.NO_CODES, False, None, None, None),
    "one": (statistics.ONE_SCALE, False, "*fp8e4nv", "*fp32", None),
    "blocks": (statistics.FLOAT_BLOCKS, False, "*fp8e5", "*fp32", None),
    "exponents": (statistics.EXPONENT_BLOCKS, False, "*fp8e4nv", "*u8", None),
    "two levels": (statistics.TWO_LEVELS, True, "*u8", "*fp8e4nv", "*fp32"),
}


def launches() -> Iterator[tuple[str, Launch, dict[str, str | None]]]:
    """(name, record, pointer types) for each scaling, then for the kernel that adds partial results."""
    for name, (scaling, packed, codes, scales, second) in SCALED.items():
        form = statistics.Codes(scaling, packed, (1, 32), 448.0, 464 / 448, (4096, 1, 128, 1))
        program = statistics.statistics((8192, 4096), (4096, 1), form)
        measure, add = (step.launch for step in program.steps)
        pointers = {
            "x": "*bf16",
            "codes": codes,
            "scales": scales,
            "second": second,
            "partials": "*fp32",
        }
        yield name, measure, pointers
    yield "sum", add, {"partials": "*fp32", "kept": "*fp64"}


def main() -> None:
    sizes = {}
    for name, launch, pointers in launches():
        both = name != "sum" and ("--all" in sys.argv or name in ("exponents", "two levels"))
        for capability in (90, 100) if both else (90,):
            key = name if name == "sum" else f"{name} sm{capability}"
            sizes[key] = len(compile_ptx(launch, pointers, capability)[0])
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
