"""Compile every quantization kernel for sm90 and sm100, without a GPU, and print PTX counts as JSON.

Two of the three kernels that compare errors are compiled for one architecture each; with `--all` for both.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_engine.common.formats import E4M3
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels import block_cast, cast, conversion, mxfp8, nvfp4
from transformer_engine.common.kernels.launch import Launch, Machine, compile_options

SHAPE = (512, 1024)
SCALES = {"power_of_two": False, "epsilon": 0.0, "value_for_inf": 3.3895313892515355e38}
VALUES, SCALAR, BYTES, CODES = "*bf16", "*fp32", "*u8", "*fp8e4nv"
_DTYPES: dict[str | None, str] = {CODES: "float8_e4m3fn", "*fp8e5": "float8_e5m2"}


def launches(
    overlaps: bool = True, shared_memory: int = 227 << 10
) -> Iterator[tuple[str, Launch, dict[str, str | None]]]:
    """(name, record, pointer types; None: that argument is absent); overlaps: with dependent launches."""
    machine = Machine(132, shared_memory, 2)
    float8 = {
        "x": VALUES,
        "multiplier": SCALAR,
        "amax": SCALAR,
        "codes": CODES,
        "codes_t": None,
        "scale": SCALAR,
    }
    block = {"x": VALUES, "codes": CODES, "scale": SCALAR, "codes_t": CODES, "scale_t": SCALAR}
    yield (
        "amax",
        cast.absolute_maximum(512 * 1024, overlaps=overlaps),
        {"x": VALUES, "amax": SCALAR},
    )
    yield "cast", cast.cast(SHAPE, E4M3, True, False, records=True), float8
    following = {**float8, "multiplier": None, "codes_t": CODES}
    yield "cast_transpose", cast.cast(SHAPE, E4M3, True, True, follows=overlaps), following
    rows = {"x": VALUES, "codes": CODES, "scale": SCALAR}
    yield (
        "block1d_rows",
        block_cast.row_blocks(SHAPE, E4M3, True, False, machine=machine, **SCALES),
        rows,
    )
    yield (
        "block1d_both",
        block_cast.row_blocks(SHAPE, E4M3, True, True, machine=machine, **SCALES),
        block,
    )
    yield "block2d", block_cast.square_blocks(SHAPE, E4M3, True, True, **SCALES), block
    exponents = {**block, "scale": BYTES, "scale_t": BYTES}
    yield "mxfp8", mxfp8.blocks(SHAPE, E4M3, True, True, square=False), exponents
    fourbit = {"x": VALUES, "amax": SCALAR, "amax_t": SCALAR, "random": SCALAR, "random_t": None}
    fourbit |= {"codes": BYTES, "scale": CODES, "codes_t": BYTES, "scale_t": CODES}
    yield "nvfp4", nvfp4.blocks(SHAPE, True, True, nvfp4.Options(hadamard=True)), fourbit
    fourbit |= {"random": None}
    for name, options in {
        "squares": nvfp4.Options(square=True, four_over_six="MSE", largest_scale=256.0),
        "rows": nvfp4.Options(per_row=True, four_over_six="fast MSE"),
        "tiles": nvfp4.Options(by_tile=True, four_over_six="MAE"),
    }.items():
        yield f"nvfp4_4over6_{name}", nvfp4.blocks(SHAPE, True, True, options), fourbit
    yield "row_maxima", cast.row_maxima(SHAPE), {"x": VALUES, "amax": SCALAR}


def compile_ptx(
    launch: Launch, pointers: dict[str, str | None], capability: int
) -> tuple[str, int]:
    """(PTX, shared-memory bytes) for a launch's kernel."""
    kernel = compiled(launch, pointers, capability)
    return kernel.asm["ptx"], kernel.metadata.shared


def compiled(launch: Launch, pointers: dict[str, str | None], capability: int) -> Any:
    """Compile a launch's kernel for a capability, with the row's conversion."""
    names = launch.kernel.arg_names
    dtypes = [_DTYPES.get(kind) for kind in pointers.values()]
    arguments, as_bytes = conversion.resolve(
        names, launch.constants, nvidia(*divmod(capability, 10)), dtypes
    )
    if as_bytes:
        pointers = {name: BYTES if kind in _DTYPES else kind for name, kind in pointers.items()}
    constants = dict(zip(names[len(names) - len(arguments) :], arguments, strict=True))
    constants |= {name: None for name, kind in pointers.items() if kind is None}
    kinds = dict.fromkeys(names, "i32") | {
        name: kind for name, kind in pointers.items() if kind is not None
    }
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants
    }
    return triton.compile(
        ASTSource(launch.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=compile_options(launch.warps, None, launch.fuses)
        | {"launch_pdl": launch.dependent},
    )


# Kernels that LLVM optimizes for seconds and that are compiled for one architecture by default: the given
# one.
COMPARING = {"nvfp4_4over6_squares": 100, "nvfp4_4over6_rows": 90}


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def main() -> None:
    facts = {}
    for capability in (90, 100):
        for name, launch, pointers in launches():
            if "--all" not in sys.argv and COMPARING.get(name, capability) != capability:
                continue
            ptx, shared = compile_ptx(launch, pointers, capability)
            facts[f"sm{capability}-{name}"] = {
                "shared": shared,
                "casts": count(r"\bcvt\.\S*e4m3x2\.f", ptx),
                "saturating": count(r"\bcvt\.rn\.satfinite\.e4m3x2\.f32", ptx),
                "fused": None if launch.fuses else count(r"\bfma\.|\b(?:mul|add|sub)\.f32", ptx),
                "double": count(r"\.f64", ptx),
                "approximate": count(r"\bdiv\.(full|approx)|\brcp\.approx", ptx),
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
