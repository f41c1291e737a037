"""Compile the FP8 conversion kernels for rows in the hardware table, without a GPU; print facts as JSON.

Arguments: "cover" for a sample, "--all" for every launch and row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels import compile_cases, fused_compile_cases, statistics_compile
from tests.kernels.compile_cases import CODES, SCALAR, VALUES, compiled, count
from tests.primitives import grouped_compile
from tests.primitives.scaled_compile import resources
from transformer_engine.common.formats import E5M2
from transformer_engine.common.hardware import Hardware, hardware_named
from transformer_engine.common.kernels import cast, fp8_attention, transpose
from transformer_engine.common.kernels.launch import Launch

Case = tuple[str, Launch, dict[str, "str | None"]]

ROWS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
COVER = {
    "8.0": ("cast", "cast e5m2", "block1d_rows", "values", "one", "transpose"),
    "8.6": ("cast",),
    "8.9": ("amax", "cast", "cast e5m2", "cast_transpose", "block1d_rows", "three"),
    "9.0": ("cast",),
    "10.0": ("cast",),
    "12.0": ("cast", "cast_transpose"),
}
GRADIENTS = "*fp8e5"


def attention_casts() -> Iterator[Case]:
    """Casts around FP8 attention."""
    pointers: dict[str, str | None] = dict.fromkeys(("q", "k", "v"), VALUES)
    pointers |= dict.fromkeys(("scale", "history", "descales"), SCALAR)
    pointers |= dict.fromkeys(("codes_q", "codes_k", "codes_v"), CODES)
    sizes = (1 << 23, 1 << 21, 1 << 21)
    yield "three", fp8_attention.codes_of_three(sizes, (2, 3), "float8_e4m3fn"), pointers
    pointers = {"codes": CODES, "values": VALUES} | dict.fromkeys(
        ("descale", "amaxes", "history"), SCALAR
    )
    yield "values", fp8_attention.value_launch(1 << 23, (8, 3), "bfloat16"), pointers


def launches(row: Hardware) -> Iterator[Case]:
    """(name, record, pointer types) for the kernels that write or read FP8 codes, planned for a row."""
    yield from compile_cases.launches(row.has("dependent launch"), row.shared_memory)
    both: dict[str, str | None] = {"x": VALUES, "codes": GRADIENTS, "codes_t": GRADIENTS}
    both |= dict.fromkeys(("multiplier", "amax", "scale"), SCALAR)
    yield "cast e5m2", cast.cast(compile_cases.SHAPE, E5M2, True, True, records=True), both
    yield from fused_compile_cases.casting_launches()
    yield from fused_compile_cases.block_launches(row.shared_memory)
    yield from grouped_compile.casts()
    yield from attention_casts()
    yield from statistics_compile.launches()
    transposed = transpose.transpose(compile_cases.SHAPE, "float8_e4m3fn")
    yield "transpose", transposed, {"codes": CODES, "codes_t": CODES}


def facts(row: Hardware, launch: Launch, pointers: dict[str, str | None]) -> dict[str, int | bool]:
    kernel = compiled(launch, pointers, int(row.target))
    ptx = kernel.asm["ptx"]
    registers, stack = resources(kernel.asm["cubin"])
    return {
        "instructions": count(r"\bcvt\.rn\.satfinite\.e[45]m[32]x2\.f32", ptx),
        "roundings to float16": count(r"\bcvt\.\S*e[45]m[32]x2\.f16", ptx),
        # The sums that round subnormal codes: 16384 and 128.
        "sums": count(r"\badd\S*f32\b.*0f4(?:6800000|3000000);", ptx),
        "fused sums": count(r"\bfma\S*f32\b.*0f4(?:6800000|3000000);", ptx),
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "fits": kernel.metadata.shared <= row.shared_memory,
    }


def main() -> None:
    results = {}
    for architecture in ROWS:
        row = hardware_named("nvidia", architecture)
        for name, launch, pointers in launches(row):
            if "--all" in sys.argv or name in COVER[architecture]:
                results[f"{architecture} {name}"] = facts(row, launch, pointers)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
