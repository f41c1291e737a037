"""Product backends on simulated GPUs, for every hardware table row; the data of `docs/hardware.json`.

    PYTHONPATH=. python -m tests.primitives.hardware_choices > docs/hardware.json

A recipe has a linear layer's three dense products and a grouped layer's two products. The libraries count as
installed, and in a second column as absent: then torch and Triton remain. "layers" has the backends for all
operations in whole layers, by `hardware_layers`. Triton has the first release with native MXFP8 and NVFP4
products.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import torch

from tests.primitives.cublaslt_on_cpu import CublasLt
from tests.primitives.hardware_layers import run_choices
from transformer_engine.common import formats, optional
from transformer_engine.common.dispatch import Table
from transformer_engine.common.hardware import ROWS, Capability, Hardware
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.primitives import grouped_gemm
from transformer_engine.pytorch.primitives.gemm import TABLE, Epilogue, cublaslt_library
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.grouped_gemm import gluon as grouped_gluon
from transformer_engine.pytorch.primitives.grouped_gemm import library as grouped_library
from transformer_engine.pytorch.primitives.grouped_gemm import triton as grouped_triton
from transformer_engine.pytorch.primitives.grouped_gemm import triton_scaled as grouped_scaled
from transformer_engine.pytorch.primitives.grouped_gemm.request import GroupedGemmRequest
from transformer_engine.pytorch.primitives.operand import Operand

E4M3, E5M2, PACKED = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
FLOAT8, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4 = formats.TENSOR_FORMATS
POWERS_1D, POWERS_2D = formats.BLOCK_1D_POWERS, formats.BLOCK_2D_POWERS
Side = tuple[formats.TensorFormat | None, torch.dtype]
# Recipe: product requirements, and (left, right) for the output, the input gradient and the weight gradient.
PRODUCTS: dict[str, tuple[Capability, tuple[tuple[Side, Side], ...]]] = {
    "none": ("bf16 products", (((None, torch.bfloat16), (None, torch.bfloat16)),) * 3),
    "float8": (
        "fp8 products",
        (
            ((FLOAT8, E4M3), (FLOAT8, E4M3)),
            ((FLOAT8, E5M2), (FLOAT8, E4M3)),
            ((FLOAT8, E5M2), (FLOAT8, E4M3)),
        ),
    ),
    "block": (
        "fp8 products",
        (((BLOCK_1D, E4M3), (BLOCK_2D, E4M3)),) * 2 + (((BLOCK_1D, E4M3), (BLOCK_1D, E4M3)),),
    ),
    "block of powers": (
        "fp8 products",
        (((POWERS_1D, E4M3), (POWERS_2D, E4M3)),) * 2 + (((POWERS_1D, E4M3), (POWERS_1D, E4M3)),),
    ),
    "mxfp8": ("mxfp8 products", (((MXFP8, E4M3), (MXFP8, E4M3)),) * 3),
    "nvfp4": ("nvfp4 products", (((NVFP4, PACKED), (NVFP4, PACKED)),) * 3),
}
# Keys in "layers", and options for `hardware_layers`: whether nvmath-python, cudnn-frontend and flash-attn-4
# count as installed, and whether the self-test has passed, which enables paths that no test has run on such a
# GPU.
SIMULATIONS = {
    "with libraries": (),
    "with torch and Triton": ("--without",),
    "with libraries, after the self-test": ("--tested",),
}
PASSES = ("output", "grad_input", "grad_weight")


def dense(a: Side, b: Side, accumulates: bool, hardware: Hardware) -> str:
    """Backend for a product [256, 512] @ [384, 512].T; accumulates: added to a float32 gradient."""
    left, right = (
        Operand(torch.empty(rows, 512 // (form.packing if form else 1), dtype=element), None, form)
        for rows, (form, element) in ((256, a), (384, b))
    )
    out = torch.empty(256, 384) if accumulates else None
    request = GemmRequest.of(left, right, Epilogue(torch.bfloat16, out=out, accumulate=accumulates))
    return choose_backend(
        TABLE, dataclasses.replace(request, device="cuda", hardware=hardware, index=0)
    )


def grouped(a: Side, b: Side, along: str) -> str:
    """Backend for a product over 8 groups."""
    gpu = torch.device("cuda", 0)
    tiled = along == "rows" and grouped_gemm.tiles_columns(a[0], 8, gpu)
    request = GroupedGemmRequest(
        along, a[0], b[0], a[1], b[1], torch.bfloat16, 8, 4096, rows_known=False, fits=False, n=512, k=512, device=gpu,
        exact=True, transposed=False, by_address=False, accumulates=False, tiled=tiled,
    )  # fmt: skip
    return choose_backend(grouped_gemm.TABLE, request)


def choose_backend(table: Table, request) -> str:
    return next(
        row.name for row in table.candidates(request) if row.rejection_reason(request) is None
    )


def choices(hardware: Hardware, libraries: bool) -> dict[str, dict[str, str]]:
    """{recipe: {product: backend}} on a GPU of this row, with nvmath-python or without."""
    version = max(hardware.scaled_dot, (3, 6))
    with (
        mock.patch.object(launch, "unavailable_reason", lambda hardware: None),
        mock.patch.object(optional, "release", lambda name: version),
        mock.patch.object(
            cublaslt_library,
            "unavailable_reason",
            lambda: None if libraries else "nvmath-python is not installed",
        ),
        mock.patch.object(cublaslt_library, "bindings", CublasLt),
        mock.patch.object(grouped_library, "current_hardware", lambda: hardware),
        mock.patch.object(grouped_triton, "current_hardware", lambda: hardware),
        mock.patch.object(grouped_gluon, "current_hardware", lambda: hardware),
        mock.patch.object(grouped_scaled, "current_hardware", lambda: hardware),
    ):
        results: dict[str, dict[str, str]] = {}
        for recipe, (_, products) in PRODUCTS.items():
            of_recipe = results[recipe] = {}
            for name, (a, b) in zip(PASSES, products, strict=True):
                of_recipe[name] = dense(a, b, name == "grad_weight", hardware)
                if recipe != "block of powers":
                    along = "rows" if name == "grad_weight" else "columns"
                    of_recipe[f"grouped {name}"] = grouped(a, b, along)
        return results


def triton_releases(row: Hardware) -> dict[str, str]:
    """First Triton releases that compile for a row, and whose tl.dot_scaled is its native product."""
    releases = {"kernels": row.triton}
    if row.has("mxfp8 products"):
        releases["scaled products"] = row.scaled_dot
    return {name: ".".join(map(str, release)) for name, release in releases.items()}


def table() -> dict[str, dict[str, Any]]:
    """Triton releases, and {"with nvmath-python" or "without": {recipe: {product: backend}}}, by row."""
    return {
        row.architecture: {
            "triton": triton_releases(row),
            "with nvmath-python": choices(row, True),
            "without nvmath-python": choices(row, False),
        }
        for row in ROWS
        if row.vendor == "nvidia"
    }


def whole_table() -> dict[str, dict[str, Any]]:
    """The product table, with the layers from one process per row and library set."""
    return {
        architecture: products
        | {
            "layers": {
                name: run_choices(architecture, *options) for name, options in SIMULATIONS.items()
            }
        }
        for architecture, products in table().items()
    }


if __name__ == "__main__":
    print(json.dumps(whole_table(), indent=2))
