"""Compile block-scaled products for rows in the hardware table, without a GPU; print {case: facts} as JSON.

Arguments: "cover" for one row per generation, "--all" for every row.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformer_engine.common import optional
from transformer_engine.common.hardware import ROWS, Hardware
from transformer_engine.common.kernels import grouped_gemm, grouped_scaled, promoted_product
from transformer_engine.common.kernels import scaled_product as kernels
from transformer_engine.common.kernels.launch import Launch, compile_options
from transformer_engine.common.kernels.product_parts import ProductEpilogue, Side, TmaOptions

COVER = ("8.0", "8.9", "10.0", "12.0")
# For each row in the cover: (shape, whether the product is added) and the rows per block in the right
# operand. These kernels take 40 s on one core; all kernels of all rows take ten minutes.
SAMPLE = {("large", False): 128, ("tail", True): 1, ("few rows", False): 128}
# Keyed by product type and whether the row has tensor memory. Triton 3.9 writes newer names for the same
# block sizes.
INSTRUCTIONS = {
    ("mxfp8", True): r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale\.(?:scale_vec::1X|block32)",
    ("mxfp8", False): r"mma\.sync\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X\S*ue8m0",
    ("nvfp4", True): r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(?:scale_vec::4X|block16)",
    ("nvfp4", False): r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*ue4m3",
    ("block", True): r"tcgen05\.mma\S*kind::f8f6f4",
    ("decoded", False): r"mma\.sync\.aligned\.m16n8k16\S*bf16\.bf16",
    ("block", False): r"mma\.sync\.aligned\.m16n8k32\S*e4m3\.e4m3",
}
HOPPER_BLOCK = r"wgmma\.mma_async\S*e4m3\.e4m3"
DECODED_BLOCK = r"mma\.sync\S*\.f16\.f16"  # for codes, which float16 represents exactly
ANY = re.compile(r"(?:tcgen05\.mma|mma\.sync|wgmma\.mma_async)\.[\w.:]*")
# For operand and scale descriptors; scales reach tensor memory without registers.
COPIED = re.compile(
    r"cp\.async\.bulk\.tensor\.2d\.(?s:.*)cp\.async\.bulk\.tensor\.5d\.(?s:.*)tcgen05\.cp"
)
WITH_TMA = TmaOptions(operands=True, results=True)
SHAPES = {
    "large": (4096, 4096, 4096),
    "tail": (4097, 4112, 4160),
    "few rows": (16, 4096, 4096),
    "64": (64, 8192, 512),
}


def launches(row: Hardware, every: bool) -> Iterator[tuple[str, str, Launch, list[str | None]]]:
    """(kind, name, launch, pointer dtypes) for a row's products."""
    scaled = optional.release("triton") >= row.scaled_dot
    for name, (m, n, k) in SHAPES.items():
        for accumulates in (False, True):
            if not every and (name, accumulates) not in SAMPLE:
                continue
            title = f"{name}{' added' * accumulates}"
            end = [None, None, "fp32", None] if accumulates else ["bf16", None, "bf16", "bf16"]
            after = ProductEpilogue(True) if accumulates else ProductEpilogue(False, "gelu", True)
            if row.has("mxfp8 products") and scaled:
                sides = Side(m, k, "e4m3"), Side(n, k, "e4m3")
                record = kernels.product(*sides, k, n, length=32, epilogue=after)
                pointers = ["fp8e4nv", "fp8e4nv", "u8", "u8", None, None, *end]
                yield "mxfp8", title, record, pointers
                if row.has("tensor memory"):
                    record = kernels.product(*sides, k, n, length=32, epilogue=after, tma=WITH_TMA)
                    yield "mxfp8", f"copied {title}", record, pointers
            if row.has("nvfp4 products") and scaled and (every or name != "few rows"):
                sides = Side(m, k // 2, "e2m1", 1), Side(n, k // 2, "e2m1", 1)
                record = kernels.product(
                    *sides, k, n, length=16, packing=2, factor=0.1, epilogue=after
                )
                pointers = ["u8", "u8", "u8", "u8", "fp32", "fp32", *end]
                yield "nvfp4", title, record, pointers
                if row.has("tensor memory"):
                    options = {"length": 16, "packing": 2, "factor": 0.1}
                    record = kernels.product(*sides, k, n, **options, epilogue=after, tma=WITH_TMA)
                    yield "nvfp4", f"copied {title}", record, pointers
            units = (128, 1) if every else (SAMPLE[name, accumulates],)
            for unit in units if row.has("fp8 products") else ():
                strides = (k // 128, 1) if unit == 128 else (1, n)
                sides = Side(m, k, "e4m3", 0, 1, (1, m)), Side(n, k, "e4m3", 0, unit, strides)
                record = promoted_product.block_product(*sides, k, n, epilogue=after)
                yield (
                    "block",
                    f"{title} {unit}",
                    record,
                    ["fp8e4nv", "fp8e4nv", "fp32", "fp32", *end],
                )
                if row.has("mxfp8 products") and scaled and (every or name == "tail"):
                    record = kernels.exponent_product(*sides, k, n, epilogue=after)
                    pointers = ["fp8e4nv", "fp8e4nv", "fp32", "fp32", None, None, *end]
                    yield "mxfp8", f"exponents {title} {unit}", record, pointers
    if not row.has("fp8 products"):
        for name, (m, n, k) in SHAPES.items():
            if not every and name not in ("tail", "few rows"):
                continue
            sides = (
                Side(m, k, "e4m3", 0, 1, (1, m)),
                Side(n, k, "e5m2", 0, 128, (k // 128, 1)),
            )
            record = promoted_product.block_product(*sides, k, n, decodes=True)
            yield "decoded", name, record, ["u8", "u8", "fp32", "fp32", "bf16", None, "bf16", None]
        return
    nvfp4 = grouped_scaled.BlockScales(("e2m1", "e2m1"), 16, 0.1)
    for kind, scales, codes, factors in (
        (
            "mxfp8",
            grouped_scaled.BlockScales(("e5m2", "e4m3")),
            ["fp8e5", "fp8e4nv"],
            ["u8", "u8", None, None],
        ),
        ("nvfp4", nvfp4, ["u8", "u8"], ["fp8e4nv", "fp8e4nv", "fp32", "fp32"]),
    ):
        if not (row.has(f"{kind} products") and scaled):  # pyright: ignore[reportArgumentType]
            continue
        # K with and without a partial last step.
        for name, depth in (("grouped rows", 2080), ("grouped even rows", 2048)):
            if every or name == "grouped rows":
                for tma in {False, row.has("tensor memory")}:
                    record = grouped_scaled.product_of_rows(4096, 2048, depth, 8, scales, tma=tma)
                    yield (
                        kind,
                        f"{'tma ' * tma}{name}",
                        record,
                        [*codes, "i32", *factors, "bf16", "bf16"],
                    )
        options = {"accumulates": True, "by_address": True}
        for tma in {False, row.has("tensor memory")}:
            record = grouped_scaled.product_of_columns(
                4096, 2048, 2048, 8, scales, **options, tma=tma
            )
            yield (
                kind,
                f"{'tma ' * tma}grouped columns",
                record,
                [*codes, *factors, "i32", "i64", "fp32"],
            )
    # Groups with one scale per codes tensor.
    options = {"scaling": grouped_gemm.TENSOR_SCALES, "shared_memory": row.shared_memory}
    options["hopper"] = row.has("hopper instructions")
    record = grouped_gemm.product_of_rows(4096, 2048, 2048, 8, **options)
    codes = ["fp8e4nv", "fp8e4nv"]
    yield "block", "grouped rows", record, [*codes, None, "fp32", "fp32", None, "i32", "bf16"]
    record = grouped_gemm.product_of_columns(2048, 2048, 8, accumulates=True, **options)
    yield "block", "grouped columns", record, [*codes, "fp32", "fp32", "i32", None, "fp32"]


def compiled(launch: Launch, dtypes: list[str | None], row: Hardware):
    """The kernel's PTX, cubin and metadata, for pointers that are multiples of 16 bytes."""
    names = launch.kernel.arg_names
    pointers = dict(zip(names, dtypes, strict=False))
    numbers = dict(zip(names[len(dtypes) :], launch.scalars, strict=False))
    constants = dict(zip(names[len(dtypes) + len(numbers) :], launch.constants, strict=True))
    constants |= {name: None for name, dtype in pointers.items() if dtype is None}
    constants |= {name: 1 for name, value in numbers.items() if type(value) is int and value == 1}
    kinds = {name: f"*{dtype}" for name, dtype in pointers.items()}
    kinds |= {
        name: "fp32" if isinstance(value, float) else "i32" for name, value in numbers.items()
    }
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and (name in pointers or numbers[name] % 16 == 0)
    }
    return triton.compile(
        ASTSource(launch.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", row.target, 32),
        options=compile_options(launch.warps, None),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
    result = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert result is not None, text
    return int(result[1]), int(result[2])


def facts(kind: str, row: Hardware, launch: Launch, dtypes: list[str | None]) -> dict[str, object]:
    kernel = compiled(launch, dtypes, row)
    expected = INSTRUCTIONS[kind, row.has("tensor memory")]
    if kind == "block" and row.has("hopper instructions"):
        expected = HOPPER_BLOCK
    elif kind == "block" and optional.release("triton") < row.scaled_dot:
        expected = DECODED_BLOCK
    instructions = sorted(set(ANY.findall(kernel.asm["ptx"])))
    registers, stack = resources(kernel.asm["cubin"])
    return {
        "native": bool(instructions) and all(re.match(expected, actual) for actual in instructions),
        "instructions": instructions,
        "registers": registers,
        "stack": stack,
        "copied": bool(COPIED.search(kernel.asm["ptx"])),
        "loads by TMA": "cp.async.bulk.tensor.2d" in kernel.asm["ptx"],
        "fits": kernel.metadata.shared <= row.shared_memory,
        "tensor memory": (getattr(kernel.metadata, "tmem_size", 0) or 0) <= row.tensor_memory,
    }


if __name__ == "__main__":
    every = "--all" in sys.argv
    rows = [row for row in ROWS if row.vendor == "nvidia"]
    results = {
        f"{row.architecture} {kind} {name}": facts(kind, row, launch, dtypes)
        for row in rows
        if every or row.architecture in COVER
        for kind, name, launch, dtypes in launches(row, every)
    }
    print(json.dumps(results))
