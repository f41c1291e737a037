"""JAX backends on simulated GPUs, per row in the hardware table; stored in `docs/hardware_jax.json`.

    PYTHONPATH=. python -m tests.jax.hardware_choices > docs/hardware_jax.json

Each recipe has the casts for single tensors and grouped rows, and the three dense products in a linear
layer. Recipes with one scale per tensor, and no recipe, also have the grouped products. Triton counts as
installed, in a release that has the native instructions, and in a second column as absent: then XLA remains.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp

from transformer_engine.common import formats, optional
from transformer_engine.common.dispatch import Table
from transformer_engine.common.hardware import ROWS, Capability, Hardware
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.primitives import (
    gemm,
    grouped_gemm,
    grouped_quantize,
    launching,
    quantize,
)
from transformer_engine.jax.primitives.gemm.request import GemmRequest
from transformer_engine.jax.primitives.grouped_gemm import GroupedBlockRequest, GroupedGemmRequest
from transformer_engine.jax.primitives.grouped_quantize import RowsRequest
from transformer_engine.jax.runtime import platform

E4M3, E5M2, E2M1, BFLOAT16 = (
    jnp.dtype(element)
    for element in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.bfloat16)
)
FLOAT8, BLOCK_1D, BLOCK_2D, MXFP8, NVFP4 = formats.TENSOR_FORMATS
SIZE = 4096  # rows, columns and contracted elements
Side = tuple[formats.TensorFormat | None, jnp.dtype]
# Recipe: what its products need, and (left, right) of the output, the input gradient and the weight gradient.
PRODUCTS: dict[str, tuple[Capability, tuple[tuple[Side, Side], ...]]] = {
    "none": ("bf16 products", (((None, BFLOAT16), (None, BFLOAT16)),) * 3),
    "float8": (
        "fp8 products",
        (((FLOAT8, E4M3), (FLOAT8, E4M3)),) + (((FLOAT8, E5M2), (FLOAT8, E4M3)),) * 2,
    ),
    "block": (
        "fp8 products",
        (((BLOCK_1D, E4M3), (BLOCK_2D, E4M3)),) * 2 + (((BLOCK_1D, E4M3), (BLOCK_1D, E4M3)),),
    ),
    "mxfp8": ("mxfp8 products", (((MXFP8, E4M3), (MXFP8, E4M3)),) * 3),
    "nvfp4": ("nvfp4 products", (((NVFP4, E2M1), (NVFP4, E2M1)),) * 3),
}
PASSES = ("output", "grad_input", "grad_weight")


def dense(a: Side, b: Side, hardware: Hardware) -> str:
    """Backend for a product with two matrices."""
    elements = a[1], b[1]
    request = GemmRequest(a[0], b[0], *elements, SIZE, SIZE, SIZE, BFLOAT16, "cuda", hardware, True)
    return select_backends(gemm.TABLE, request)


def grouped(a: Side, b: Side, contracts_rows: bool) -> str:
    """Backend for a grouped product over 8 row groups."""
    if a[0] is not None and b[0] is not None and a[0].block is not None:
        elements, extents = (a[1], b[1]), (8, SIZE, SIZE, SIZE)
        request = GroupedBlockRequest(
            *extents, a[0], b[0], elements, BFLOAT16, contracts_rows, False, (False, False), "cuda"
        )
        return select_backends(grouped_gemm.BLOCK_TABLE, request)
    scaled = a[0] is not None
    request = GroupedGemmRequest(
        8, SIZE, SIZE, SIZE, a[1], BFLOAT16, contracts_rows, scaled, scaled, "cuda"
    )
    return select_backends(grouped_gemm.TABLE, request)


def cast(a: Side, per_tile: bool = False) -> str:
    """The backend that quantizes a matrix; per_tile: rows in groups, each with a second-level scale."""
    assert a[0] is not None
    element = next(
        one for one in (formats.E4M3, formats.E5M2, formats.E2M1) if one.name in a[0].elements
    )
    spec = QuantizeSpec(a[0], element, columnwise=not per_tile)
    request = quantize.QuantizeRequest(
        spec, (SIZE, SIZE), BFLOAT16, "cuda", maxima_per_tile=per_tile
    )
    return select_backends(quantize.TABLE, request)


def cast_of_groups(a: Side) -> str:
    """The backend that quantizes rows in 8 groups."""
    assert a[0] is not None
    if a[0] == FLOAT8:
        return select_backends(grouped_quantize.ROWS, RowsRequest(8, SIZE, SIZE, BFLOAT16, "cuda"))
    return cast(a, per_tile=a[0].levels is not None)


def select_backends(table: Table, request) -> str:
    return next(
        row.name for row in table.candidates(request) if row.rejection_reason(request) is None
    )


@contextlib.contextmanager
def simulate_gpu(hardware: Hardware, with_triton: bool) -> Iterator[None]:
    """Lower CUDA programs for the GPU in this table row."""
    release = max(hardware.scaled_dot, (3, 6))
    missing = None if with_triton else "triton is not installed"
    failure = optional.failure
    with (
        mock.patch.dict(os.environ, {"TE_JAX_KERNELS": "1", "XLA_FLAGS": ""}),
        mock.patch.object(platform, "WITHOUT_GPU", hardware),
        mock.patch.object(launching, "kernels_unsupported_reason", lambda: missing),
        mock.patch.object(optional, "release", lambda name: release),
        mock.patch.object(
            optional,
            "failure",
            lambda name, *names: None if "gluon" in name else failure(name, *names),
        ),
    ):
        yield


def choices(hardware: Hardware, with_triton: bool) -> dict[str, dict[str, str]]:
    """{recipe: {operation: backend}} on the GPU in this table row."""
    results: dict[str, dict[str, str]] = {}
    with simulate_gpu(hardware, with_triton):
        for recipe, (_, products) in PRODUCTS.items():
            of_recipe = results[recipe] = {}
            left, right = products[0]
            if recipe != "none":
                of_recipe |= {"cast": cast(left), "cast of kernels": cast(right)}
                of_recipe["cast of rows in groups"] = cast_of_groups(left)
            for name, (a, b) in zip(PASSES, products, strict=True):
                of_recipe[name] = dense(a, b, hardware)
                of_recipe[f"grouped {name}"] = grouped(a, b, name == "grad_weight")
    return results


def table() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """{architecture: {"with triton" or "without triton": {recipe: {operation: backend}}}}, NVIDIA only."""
    return {
        row.architecture: {"with triton": choices(row, True), "without triton": choices(row, False)}
        for row in ROWS
        if row.vendor == "nvidia"
    }


if __name__ == "__main__":
    print(json.dumps(table(), indent=2))
