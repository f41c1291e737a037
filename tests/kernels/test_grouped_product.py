"""The grouped products in Gluon: the assembler's output, without a GPU."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.kernels.test_block_product import SHARED_MEMORY, UNKNOWN, assemble
from transformer_engine.common import optional

pytestmark = UNKNOWN
STACK = {(3, 8): 8}  # bytes per thread by release of Triton: exact products with float32 results

GRADIENTS, CODES, SCALES = "float8_e5m2", "float8_e4m3fn", ("float32", "float32")


def check(kernel, output: str) -> None:
    match = re.search(r"(\d+) bytes stack frame", output)
    assert match is not None and int(match[1]) <= STACK.get(optional.release("triton"), 0), output
    assert not re.search(r"C75\d\d|serialized", output), output
    assert kernel.shared_memory <= SHARED_MEMORY
    assert kernel.warps == 12, (
        "two groups that multiply, and a warp that fetches, rounded up to a group"
    )
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k32") == 16


@pytest.mark.parametrize("n, k", [(1408, 2048), (400, 272)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [None, "bfloat16"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.sampled(5)
def test_row_products_spill_nothing(tmp_path, exact, bias, dtype, n, k):
    from transformer_engine.common.kernels.grouped_product import product_of_rows

    launch = product_of_rows(32768, n, k, 64, dtype, exact=exact, processors=132)
    dtypes = (CODES, CODES, *SCALES, bias, "int32", None, dtype)
    check(*assemble(tmp_path, launch, dtypes))


@pytest.mark.parametrize("n, k", [(1408, 2048), (400, 272)])
@pytest.mark.parametrize(
    "dtype, accumulates", [("bfloat16", False), ("float32", False), ("float32", True)]
)
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.sampled(6)
def test_column_products_spill_nothing(tmp_path, exact, by_address, dtype, accumulates, n, k):
    from transformer_engine.common.kernels.grouped_product import product_of_columns

    options = {
        "exact": exact,
        "processors": 132,
        "accumulates": accumulates,
        "by_address": by_address,
    }
    launch = product_of_columns(n, k, 64, dtype, **options)
    table = "int64" if by_address else None
    dtypes = (GRADIENTS, CODES, *SCALES, None, "int32", table, dtype)
    check(*assemble(tmp_path, launch, dtypes))


@pytest.mark.parametrize("n, k", [(1408, 2048), (400, 272)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [None, "bfloat16"])
@pytest.mark.sampled(4)
def test_row_products_of_blocks_spill_nothing(tmp_path, bias, dtype, n, k):
    from transformer_engine.common.kernels.grouped_block_product import product_of_rows

    launch = product_of_rows(32768, n, k, 64, dtype, processors=132)
    dtypes = (GRADIENTS, CODES, *SCALES, bias, "int32", None, dtype)
    check(*assemble(tmp_path, launch, dtypes))


@pytest.mark.parametrize("n, k", [(1408, 2048), (400, 272)])
@pytest.mark.parametrize(
    "dtype, accumulates", [("bfloat16", False), ("float32", False), ("float32", True)]
)
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.sampled(4)
def test_column_products_of_blocks_spill_nothing(tmp_path, by_address, dtype, accumulates, n, k):
    from transformer_engine.common.kernels.grouped_block_product import product_of_columns

    options = {"processors": 132, "accumulates": accumulates, "by_address": by_address}
    launch = product_of_columns(n, k, 64, dtype, **options)
    table = "int64" if by_address else None
    dtypes = (GRADIENTS, CODES, *SCALES, None, "int32", table, dtype)
    check(*assemble(tmp_path, launch, dtypes))


@pytest.mark.parametrize("directions", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("kind", ["stack", "matrices", "rows", "tiled rows"])
@pytest.mark.sampled(5)
def test_two_programs_that_hold_tiles_fit_a_multiprocessor(tmp_path, kind, directions):
    from transformer_engine.common.formats import E4M3
    from transformer_engine.common.kernels.grouped_held_cast import held_cast

    by_rows = "rows" in kind
    launch = held_cast(
        (32768, 2048) if by_rows else (1408, 2048),
        64,
        by_rows,
        E4M3,
        False,
        0.0,
        *directions,
        processors=132,
        tiled="tiled" in kind,
    )
    assert launch.cooperative and launch.grid == (2 * 132, 1, 1)
    codes = [CODES if direction else None for direction in directions]
    inputs = ("bfloat16", "int64" if kind == "matrices" else None, "int32" if by_rows else None)
    dtypes = (*inputs, *codes, "float32", "float32")
    kernel, output = assemble(tmp_path, dataclasses.replace(launch, cooperative=False), dtypes)
    assert "0 bytes spill stores, 0 bytes spill loads" in output, output
    assert 2 * (kernel.shared_memory + 1024) <= SHARED_MEMORY + 1024


@pytest.mark.parametrize("by_rows", [False, True])
def test_only_groups_that_two_turns_measure_are_held(by_rows):
    from transformer_engine.common.kernels.grouped_held_cast import fits

    assert fits(1408, 2048, by_rows, 2, 132) and fits(2048, 2112, by_rows, 2, 132)
    assert not fits(2048, 2176, by_rows, 2, 132)  # 544 tiles; two turns measure 528
    assert not fits(1408, 2048, by_rows, 4, 132)
    assert not fits(1408, 2000, by_rows, 2, 132)
    assert fits(1400, 2048, by_rows, 2, 132) == by_rows


def test_programs_do_not_outnumber_tiles_or_processors():
    from transformer_engine.common.kernels.grouped_product import (
        product_of_columns,
        product_of_rows,
    )

    options = {"exact": True, "processors": 132}
    assert product_of_rows(256, 272, 512, 2, "bfloat16", **options).grid == (4 * 2, 1, 1)
    assert product_of_columns(144, 272, 3, "bfloat16", **options).grid == (3 * 2 * 2, 1, 1)
    assert product_of_columns(1408, 2048, 64, "bfloat16", **options).grid == (132, 1, 1)


def test_products_accumulate_only_into_float32():
    from transformer_engine.common.kernels.grouped_product import product_of_columns

    with pytest.raises(AssertionError, match="rounded once"):
        product_of_columns(128, 128, 2, "bfloat16", exact=True, processors=132, accumulates=True)
