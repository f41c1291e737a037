"""A layer's product is the product of anybody, whatever way its matrices lie and whoever wants to see it."""

from __future__ import annotations

import pytest
import torch
from support.plans import PlanByAddress
from torch import Tensor

from transformer_engine.common.dispatch import observing, use_backend
from transformer_engine.pytorch.primitives.gemm import TABLE, Epilogue, RepeatedProduct, gemm, plain
from transformer_engine.pytorch.primitives.gemm import repeated as file

M, N, K = 6, 4, 8
TURNS = [(False, False), (False, True), (True, True), (True, False)]


@pytest.fixture
def library(monkeypatch):
    """A library that plans every product."""
    PlanByAddress.made = 0
    monkeypatch.setattr(file.cublaslt_plan, "Plan", PlanByAddress)
    monkeypatch.setattr(type(TABLE), "bind", lambda table, request: PlanByAddress(request).run)


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16()


def _given(turns: tuple[bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """a and b, each as it is handed over, and what they are to give."""
    a, b = _matrix(M, K, 1), _matrix(N, K, 2)
    expected = (a.float() @ b.float().t()).bfloat16()
    return (a.t().contiguous() if turns[0] else a), (b.t().contiguous() if turns[1] else b), expected


def _product(turns: tuple[bool, bool]) -> RepeatedProduct:
    return RepeatedProduct(torch.device("cpu"), torch.bfloat16, True, turns)


@pytest.mark.parametrize("turns", TURNS)
def test_matrices_are_multiplied_as_they_lie(library, turns):
    a, b, expected = _given(turns)
    assert torch.equal(_product(turns).of_matrices(a, b), expected)


@pytest.mark.parametrize("turns", TURNS)
def test_without_the_library_it_is_the_product_of_anybody(turns):
    a, b, expected = _given(turns)
    operands = plain(a.t() if turns[0] else a), plain(b.t() if turns[1] else b)
    found = _product(turns).of_matrices(a, b)
    assert torch.equal(found, gemm(*operands, Epilogue(torch.bfloat16)))
    assert torch.equal(found, expected)


def test_every_way_to_lie_is_planned_by_itself(library):
    product = _product((False, False))
    wide = _matrix(M, 2 * K, 3)
    b = _matrix(N, K, 2)
    for a in (wide[:, :K], wide[:, K:], wide[:, :K].contiguous(), _matrix(K, M, 4).t()):
        assert torch.equal(product.of_matrices(a, b), (a.float() @ b.float().t()).bfloat16())
    assert PlanByAddress.made == 3  # the two halves of a matrix lie alike


@pytest.mark.parametrize("with_bias", [False, True])
def test_leading_dimensions_are_those_of_the_result(library, with_bias):
    x, weight = _matrix(M, K, 1).view(2, 3, 1, K), _matrix(N, K, 2)
    bias = torch.arange(N).bfloat16() if with_bias else None
    y = _product((False, False)).of_matrices(x, weight, bias)
    expected = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    assert torch.equal(y, expected.bfloat16())
    flat = _product((False, False)).of_matrices(x.view(M, K), weight, bias, x.shape[:-1])
    assert torch.equal(flat, y)


def test_dimensions_that_make_no_matrix_are_copied(library):
    x, weight = _matrix(M, K, 1).view(2, 3, K).transpose(0, 1), _matrix(N, K, 2)
    assert torch.equal(
        _product((False, False)).of_matrices(x, weight), (x.float() @ weight.float().t()).bfloat16()
    )


def test_a_weight_gradient_sums_over_all_leading_dimensions(library):
    dy, x = _matrix(M, N, 1).view(2, 3, N), _matrix(M, K, 2).view(2, 3, K)
    dw = _product((True, True)).of_matrices(dy, x)
    assert torch.equal(dw, (dy.view(M, N).float().t() @ x.view(M, K).float()).bfloat16())


def test_whoever_observes_or_forces_meets_every_product(library, monkeypatch):
    a, b, expected = _given((False, False))
    product = _product((False, False))
    product.of_matrices(a, b)
    monkeypatch.undo()
    seen: list[str] = []
    with observing(lambda operation, request: seen.append(operation)):
        assert torch.equal(product.of_matrices(a, b), expected)
    assert seen == ["gemm"]
    with use_backend(gemm="cublaslt"), pytest.raises(Exception, match="it needs a CUDA device"):
        product.of_matrices(a, b)


def test_extents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="contract 8 and 6 elements"):
        _product((False, False)).of_matrices(_matrix(M, K, 1), _matrix(N, 6, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_it_has_the_bits_of_anybodys(turns, with_bias):
    a, b = torch.randn(64, 96, device="cuda").bfloat16(), torch.randn(32, 96, device="cuda").bfloat16()
    bias = torch.randn(32, device="cuda").bfloat16() if with_bias else None
    given = (a.t().contiguous() if turns[0] else a), (b.t().contiguous() if turns[1] else b)
    left, right = (plain(x.t() if turned else x) for x, turned in zip(given, turns, strict=True))
    product = RepeatedProduct(a.device, torch.bfloat16, True, turns)
    expected = gemm(left, right, Epilogue(torch.bfloat16, bias))
    assert torch.equal(product.of_matrices(*given, bias), expected)
    assert torch.equal(product.of_matrices(*given, bias, torch.Size((2, 32))), expected.view(2, 32, 32))
