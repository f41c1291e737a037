"""Grouped products: every backend against float64 products per group, in every format, for any sizes."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, E5M2, FLOAT8
from transformer_engine.pytorch import explain
from transformer_engine.pytorch.primitives.grouped_gemm import (
    GroupedColumns,
    GroupedMatrices,
    GroupedRows,
    Matrices,
    gluon,
    make_groups,
    product_of_columns,
    product_of_rows,
)
from transformer_engine.pytorch.primitives.grouped_quantize import quantize_matrices, quantize_rows
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize

N, K = 272, 144
SPLITS = {
    "one": (77,),
    "even": (128, 256, 128),
    "sixteens": (48, 0, 16, 208, 160),
    "ragged": (3, 131, 0, 0, 70, 1, 258, 17),
    "many": tuple(8 * (i % 5) for i in range(20)),
}
BACKENDS = [
    "reference",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "gluon", "library")),
]
FORMATS = ("plain", "float8", "block")
# In units of the largest result: float32 sums over products of 16-bit or 8-bit values, rounded once to
# bfloat16; fast FP8 sums keep 14 bits.
TOLERANCE = {"plain": 1e-2, "float8": 1e-2, "block": 1e-2}


def make_spec(kind: str, element, square: bool = False) -> QuantizeSpec:
    if kind == "float8":
        return QuantizeSpec(FLOAT8, element, rowwise=True, columnwise=True)
    return QuantizeSpec(
        BLOCK_2D if square else BLOCK_1D, element, rowwise=True, columnwise=True, power_of_two=True
    )


def gradient_element(kind: str, backend: str):
    """E5M2 unless a backend reads block scales by cuBLASLt, which takes them for E4M3 alone."""
    return E5M2 if kind == "float8" or backend in ("triton", "gluon") else E4M3


def quantized_directions(x: torch.Tensor, spec: QuantizeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 values for the row codes and column codes of x."""
    with use_backend(quantize="reference"):
        tensor = quantize(x, spec)
    rows = dequantize(Operand(tensor.codes, tensor.scale, spec.format))
    columns = dequantize(Operand(tensor.codes_t, tensor.scale_t, spec.format)).t()
    return rows.double(), columns.double()


def assert_close(result, expected, kind, backend, empty=False) -> None:
    largest = expected.abs().max()
    assert (result.double() - expected).abs().max() <= TOLERANCE[kind] * largest + (
        0 if not empty else 1e-9
    )


def run_forced(backend: str, function):
    """Run with a forced backend; skip the case if it is unsupported."""
    try:
        with use_backend(grouped_gemm=backend):
            return function()
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("kind", FORMATS)
def test_row_products_equal_per_group_products(kind, splits, transposed, exact, backend, device):
    count, total = len(splits), sum(splits)
    x = torch.randn(total, K, device=device, dtype=torch.bfloat16)
    shape = (K, N) if transposed else (N, K)
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
    bias = torch.randn(count, N, device=device, dtype=torch.bfloat16) if exact else None
    groups = make_groups(splits, total, x.device)
    if kind == "plain":
        a, b = GroupedRows(x), GroupedMatrices(Matrices.of(weights), transposed)
        parts = [part.double() for part in x.split(splits)]
        factors = [w.double() if transposed else w.double().t() for w in weights]
    else:
        first = make_spec(kind, gradient_element(kind, backend))
        second = make_spec(kind, E4M3, square=True)
        result = quantize_rows(x, groups, first)
        contents = quantize_matrices(Matrices.of(weights), second)
        codes, scale = (
            (contents.codes_t, contents.scale_t) if transposed else (contents.codes, contents.scale)
        )
        a = GroupedRows(result.codes, result.scale, first.format)
        b = GroupedMatrices(codes=codes, scale=scale, format=second.format)
        parts = [quantized_directions(part, first)[0] for part in x.split(splits)]
        factors = [quantized_directions(w, second)[0] for w in weights]
        factors = factors if transposed else [f.t() for f in factors]
    y = run_forced(
        backend, lambda: product_of_rows(a, b, groups, torch.bfloat16, bias=bias, exact=exact)
    )
    expected = torch.cat([part @ factor for part, factor in zip(parts, factors, strict=True)])
    if bias is not None:
        repeats = torch.tensor(splits, device=device)
        expected += bias.double().repeat_interleave(repeats, 0)
    assert_close(y, expected, kind, backend)


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", ["stack", "apart", "added", "narrow"])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("kind", FORMATS)
def test_column_products_equal_per_group_products(kind, splits, target, backend, device):
    count, total = len(splits), sum(splits)
    dy = torch.randn(total, N, device=device, dtype=torch.bfloat16)
    x = torch.randn(total, K, device=device, dtype=torch.bfloat16)
    groups = make_groups(splits, total, x.device)
    if kind == "plain":
        a, b = GroupedColumns(dy), GroupedColumns(x)
        first = [part.double() for part in dy.split(splits)]
        second = [part.double() for part in x.split(splits)]
    else:
        specs = (
            make_spec(kind, gradient_element(kind, backend)),
            make_spec(kind, E4M3),
        )
        tiled = backend == "gluon"
        output, contents = (
            quantize_rows(values, groups, spec, tiled=tiled)
            for values, spec in zip((dy, x), specs, strict=True)
        )
        a = GroupedColumns(output.codes_t, output.scale_t, specs[0].format)
        b = GroupedColumns(contents.codes_t, contents.scale_t, specs[1].format)
        first = [quantized_directions(part, specs[0])[1] for part in dy.split(splits)]
        second = [quantized_directions(part, specs[1])[1] for part in x.split(splits)]
    dtype = torch.bfloat16 if target == "narrow" else torch.float32
    out = torch.full((count, N, K), 3.0, device=device, dtype=dtype)
    position = (
        [torch.full((N, K), 3.0, device=device) for _ in splits] if target == "apart" else out
    )

    def run():
        product_of_columns(a, b, groups, (N, K), position, accumulate=target == "added")
        return torch.stack(position) if target == "apart" else out

    result = run_forced(backend, run)
    expected = torch.stack([p.t() @ q for p, q in zip(first, second, strict=True)])
    assert_close(result, expected + (3.0 if target == "added" else 0.0), kind, backend)
    if target != "added":
        assert not result[[i for i, rows in enumerate(splits) if rows == 0]].any()


@pytest.mark.parametrize("backend", BACKENDS[:3])
@pytest.mark.parametrize(
    "kind, exact", [("float8", False), ("float8", True), ("block", True)], ids=str
)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_tiled_column_products_are_bitwise_equal_to_contiguous_columns(
    splits, kind, exact, backend, device
):
    total = sum(splits)
    dy, x = (torch.randn(total, width, device=device, dtype=torch.bfloat16) for width in (N, K))
    groups = make_groups(splits, total, dy.device)
    element = gradient_element(kind, backend)
    results = []
    for tiled in (False, True):
        a, b = (
            GroupedColumns(result.codes_t, result.scale_t, make_spec(kind, E4M3).format)
            for result in (
                quantize_rows(dy, groups, make_spec(kind, element), tiled=tiled),
                quantize_rows(x, groups, make_spec(kind, E4M3), tiled=tiled),
            )
        )
        if tiled:
            assert a.codes.shape[1:] == (N, 128) and b.codes.shape[1:] == (K, 128)
        out = torch.full((len(splits), N, K), torch.nan, device=device, dtype=torch.bfloat16)
        arguments = (a, b, groups, (N, K), out)
        name = "triton" if backend == "gluon" and not tiled else backend
        run_forced(name, lambda arguments=arguments: product_of_columns(*arguments, exact=exact))
        results.append(out)
    assert not results[0].isnan().any()
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, exact", [("float8", False), ("float8", True), ("block", True)], ids=str
)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_gluon_and_triton_row_products_are_bitwise_equal(splits, kind, exact, device):
    x = torch.randn(sum(splits), K, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(N, K, device=device, dtype=torch.bfloat16) for _ in splits]
    bias = torch.randn(len(splits), N, device=device, dtype=torch.bfloat16)
    groups = make_groups(splits, len(x), x.device)
    spec, square = make_spec(kind, E5M2), make_spec(kind, E4M3, square=True)
    result = quantize_rows(x, groups, spec)
    contents = quantize_matrices(Matrices.of(weights), square)
    a = GroupedRows(result.codes, result.scale, spec.format)
    b = GroupedMatrices(codes=contents.codes, scale=contents.scale, format=square.format)
    results = []
    for backend in ("triton", "gluon"):
        out = torch.full((len(x), N), torch.nan, device=device, dtype=torch.bfloat16)
        arguments = {"bias": bias, "exact": exact, "out": out}
        run_forced(
            backend,
            lambda arguments=arguments: product_of_rows(a, b, groups, torch.bfloat16, **arguments),
        )
        results.append(out)
    assert not results[0].isnan().any()
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_a_gpu_uses_one_launch_for_many_groups_and_the_library_for_few(kind):
    many = "gluon" if kind != "plain" and gluon.unavailable_reason() is None else "triton"
    for count, chosen in ((4, "library"), (64, many)):
        splits = (128,) * count
        x = torch.randn(128 * count, 256, device="cuda", dtype=torch.bfloat16)
        weights = Matrices.of([torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)] * count)
        groups = make_groups(splits, x.shape[0], x.device)
        a, b = GroupedRows(x), GroupedMatrices(weights)
        if kind != "plain":
            result, contents = (
                quantize_rows(x, groups, make_spec(kind, E4M3)),
                quantize_matrices(weights, make_spec(kind, E4M3, square=True)),
            )
            form = make_spec(kind, E4M3).format
            a = GroupedRows(result.codes, result.scale, form)
            b = GroupedMatrices(
                codes=contents.codes,
                scale=contents.scale,
                format=make_spec(kind, E4M3, square=True).format,
            )
        (decision,) = explain(product_of_rows, a, b, groups, torch.bfloat16).decisions
        verdicts = decision.verdicts
        assert [v.backend for v in verdicts if v.chosen] == [chosen]


def test_rows_and_matrices_of_different_depth_are_rejected(device):
    x = torch.randn(32, 48, device=device, dtype=torch.bfloat16)
    b = GroupedMatrices(Matrices.of([torch.randn(16, 32, device=device, dtype=torch.bfloat16)]))
    with pytest.raises(ValueError, match="contract 48 elements, the matrices 32"):
        product_of_rows(GroupedRows(x), b, make_groups((32,), 32, x.device), torch.bfloat16)


def test_zero_rows_give_an_empty_result_and_zero_gradients(device):
    x = torch.randn(0, 32, device=device, dtype=torch.bfloat16)
    groups = make_groups((0, 0), 0, x.device)
    weights = [torch.randn(16, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    y = product_of_rows(
        GroupedRows(x), GroupedMatrices(Matrices.of(weights)), groups, torch.bfloat16
    )
    assert y.shape == (0, 16)
    out = torch.ones(2, 16, 32, device=device)
    product_of_columns(GroupedColumns(y), GroupedColumns(x), groups, (16, 32), out, accumulate=True)
    assert (out == 1).all()
    product_of_columns(GroupedColumns(y), GroupedColumns(x), groups, (16, 32), out)
    assert not out.any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaling", [0, 1, 2])
def test_grouped_products_with_one_feature_compile(scaling):
    """A width of 1 is a kernel constant, not an argument."""
    kernels = pytest.importorskip("transformer_engine.common.kernels.grouped_gemm")
    from transformer_engine.common.kernels.compiled import compiled

    code, scale = ("float8_e4m3fn", "float32") if scaling else ("bfloat16", None)
    rows = kernels.product_of_rows(256, 1, 64, 2, scaling=scaling)
    assert compiled(rows, (code, code, None, scale, scale, None, "int32", "bfloat16"), 90).ptx
    columns = kernels.product_of_columns(1, 64, 2, scaling=scaling)
    assert compiled(columns, (code, code, scale, scale, "int32", None, "bfloat16"), 90).ptx
