"""Write the tables in docs/your_gpu.md from the hardware table and two simulations; --check only compares.

python docs/hardware_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from generated import ROOT, write

from transformer_engine.common.hardware import ROWS, Hardware

PAGE = ROOT / "docs" / "your_gpu.md"
CHOICES = json.loads((ROOT / "docs" / "hardware.json").read_text())
JAX_CHOICES = json.loads((ROOT / "docs" / "hardware_jax.json").read_text())
# Products in docs/hardware.json by their name in the page's table.
PRODUCTS = {
    "none": "bfloat16",
    "float8": "FP8, one scale",
    "block of powers": "FP8, blocks of 128",
    "block": "FP8, blocks of 128, float32 scales",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
# Layer recipes in docs/hardware.json by their name in the page's table, and operations that may be emulated.
RECIPES = {
    "none": "bfloat16",
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
OPERATIONS = {"gemm": "products", "grouped_gemm": "products"}
NOT_NATIVE = ("reference", "widen", "decode", "decoded")
OTHERS = ("grouped", "cast")  # operation prefixes besides dense products
# Architectures on which this package's kernels are run before a release.
RUN_HERE = ("9.0",)
ATTENTION = {
    "cuDNN": "cudnn attention",
    "cuDNN, FP8": "cudnn fp8 attention",
    "FlashAttention-4": "flash attention 4",
    "Triton": "triton kernels",
}
NVIDIA = [row for row in ROWS if row.vendor == "nvidia"]


def gpus() -> str:
    """Architecture table: names, tested kernels, and limits."""
    lines = [
        "| compute capability or target | GPUs | kernels | Triton | Triton for MXFP8 and NVFP4 products "
        "| shared memory per block | cuDNN backward, largest head |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        head = str(row.backward_head) if row.backward_head else "no cuDNN"
        versions = CHOICES[row.architecture]["triton"] if row in NVIDIA else {"kernels": "3.6"}
        cells = (
            row.architecture,
            ", ".join(row.gpus),
            _state(row),
            *(
                f"{versions[name]} on" if name in versions else ""
                for name in ("kernels", "scaled products")
            ),
            f"{row.shared_memory >> 10} KiB",
            head,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _state(row: Hardware) -> str:
    if row.architecture in RUN_HERE:
        return "run on H100 and H200"
    if row.vendor == "amd":
        return "kernels without FP8 codes compiled, not run"
    return "compiled and simulated, not run"


def products() -> str:
    """Product table: the backend with nvmath-python, and without it where it differs."""
    lines = [
        f"| | {' | '.join(PRODUCTS.values())} |",
        f"| --- |{' --- |' * len(PRODUCTS)}",
    ]
    lines += _rows(CHOICES, PRODUCTS)
    emulated = " | ".join(["emulated"] * (len(PRODUCTS) - 1))
    lines += [
        f"| {row.architecture} | native: matmul | {emulated} |"
        for row in ROWS
        if row.vendor == "amd"
    ]
    return "\n".join(lines) + "\n"


def jax_products() -> str:
    """JAX product table: the backend with Triton, and without it where it differs."""
    titles = {name: title for name, title in PRODUCTS.items() if name != "block of powers"}
    titles["block"] = PRODUCTS["block of powers"]  # JAX multiplies by arbitrary scales
    lines = [
        f"| | {' | '.join(titles.values())} |",
        f"| --- |{' --- |' * len(titles)}",
        *_rows(JAX_CHOICES, titles),
    ]
    return "\n".join(lines) + "\n"


def _rows(
    choices: dict[str, dict[str, dict[str, dict[str, str]]]], recipes: Iterable[str]
) -> list[str]:
    lines = []
    for row in NVIDIA:
        choice = choices[row.architecture]
        with_library, without = (
            choice[name] for name in choice if name not in ("layers", "triton")
        )
        cells = [_backends(with_library[recipe], without[recipe]) for recipe in recipes]
        lines.append(f"| {row.architecture} | {' | '.join(cells)} |")
    return lines


def _backends(with_library: dict[str, str], without: dict[str, str]) -> str:
    rows = [
        ", ".join(
            dict.fromkeys(
                backend for name, backend in choice.items() if not name.startswith(OTHERS)
            )
        )
        for choice in (with_library, without)
    ]
    names = rows[0] if rows[0] == rows[1] else f"{rows[0]}; else {rows[1]}"
    dense = [backend for name, backend in with_library.items() if not name.startswith(OTHERS)]
    emulated = all(backend in NOT_NATIVE for backend in dense)
    return f"{'emulated' if emulated else 'native'}: {names}"


def layers() -> str:
    """Training-step table: native, or the operations that are emulated."""
    lines = [f"| | {' | '.join(RECIPES.values())} |", f"| --- |{' --- |' * len(RECIPES)}"]
    for row in NVIDIA:
        layer_choices: list[dict[str, Any]] = [*CHOICES[row.architecture]["layers"].values()]
        cells: list[str] = []
        for recipe in RECIPES:
            emulated: set[str] = {
                str(OPERATIONS.get(operation, operation))
                for of_libraries in layer_choices
                for of_layer in of_libraries.values()
                for operations in of_layer.get(recipe, {}).values()
                for operation, backends in operations.items()
                if set(NOT_NATIVE) & set(backends.split(", "))
            }
            cells.append(f"emulated: {', '.join(sorted(emulated))}" if emulated else "native")
        lines.append(f"| {row.architecture} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def attention() -> str:
    """Attention backend table."""
    lines = [f"| | {' | '.join(ATTENTION)} |", f"| --- |{' --- |' * len(ATTENTION)}"]
    for row in ROWS:
        cells = []
        for capability in ATTENTION.values():
            version = (
                f" from {'.'.join(map(str, row.cudnn))}"
                if "cudnn" in capability and any(row.cudnn)
                else ""
            )
            cells.append(f"yes{version}" if row.has(capability) else "")  # pyright: ignore[reportArgumentType]
        lines.append(f"| {row.architecture} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sections = {
        "gpus": gpus(),
        "products": products(),
        "layers": layers(),
        "attention": attention(),
        "products of JAX": jax_products(),
    }
    sys.exit(write(__file__, {PAGE: sections}))
