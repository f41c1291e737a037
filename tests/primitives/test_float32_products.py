"""Float32 products under settings that let torch round their operands to TF32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from transformer_engine.pytorch.runtime import float32_products
from transformer_engine.pytorch.runtime.float32_products import (
    float32_product,
    solve_unit_triangular,
)

LIBRARIES = ("cuda", "mkldnn")


def settings() -> list[str]:
    """Precision settings for torch's products."""
    pairs = [
        ("generic", "all"),
        *((library, op) for library in LIBRARIES for op in ("all", "matmul")),
    ]
    return [torch._C._get_fp32_precision_getter(*pair) for pair in pairs]


@pytest.fixture
def _settings_are_restored() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for library in LIBRARIES:
        torch._C._set_fp32_precision_setter(library, "matmul", "none")


pytestmark = pytest.mark.usefixtures("_settings_are_restored")


def matrices(
    device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("setting", ["high", "medium"])
@pytest.mark.parametrize("function", [float32_product, solve_unit_triangular])
def test_results_and_gradients_do_not_depend_on_the_setting(function, setting, device):
    left, right, grad = matrices(device, (3, 96, 96), (3, 96, 64), (3, 96, 64))
    leaves = (left, right)

    def run() -> tuple[torch.Tensor, ...]:
        out = function(0.1 * left, right)
        return out, *torch.autograd.grad(out, leaves, grad)

    expected = run()
    torch.set_float32_matmul_precision(setting)
    for actual, reference in zip(run(), expected, strict=True):
        assert torch.equal(actual, reference)
    exact = torch.matmul if function is float32_product else _solve
    out = exact(0.1 * left.double(), right.double())
    for actual, reference in zip(
        expected, (out, *torch.autograd.grad(out, leaves, grad.double())), strict=True
    ):
        assert (actual.double() - reference).norm() < 1e-6 * reference.norm()


def _solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
    ids=["high", "medium", "allow_tf32", "all products", "CPU products"],
)
def test_the_callers_precision_settings_are_restored(choose, device):
    choose()
    before = settings()
    a, b = matrices(device, (2, 8, 8), (2, 8, 8))
    (float32_product(a, b).sum() + solve_unit_triangular(a, b).sum()).backward()
    assert settings() == before
    # An inherited setting is still inherited.
    torch.backends.fp32_precision = "ieee"
    after = settings()
    torch.backends.fp32_precision = "none"
    choose()
    torch.backends.fp32_precision = "ieee"
    assert settings() == after


def test_the_setting_is_restored_after_the_last_of_several_threads():
    torch.set_float32_matmul_precision("high")
    before = settings()
    with float32_products._unrounded("cpu"):
        with float32_products._unrounded("cpu"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert settings() == before


def test_first_and_second_derivatives_in_every_mode_match_finite_differences(monkeypatch):
    monkeypatch.setattr(float32_products, "_is_rounded", lambda _: True)
    shapes = (2, 3, 3), (2, 3, 2)
    leaves = tuple(matrices("cpu", *shapes, dtype=torch.float64))
    for function in (
        float32_product,
        solve_unit_triangular,
        lambda a, b: solve_unit_triangular(a, b, upper=True),
    ):
        assert gradcheck(
            function,
            leaves,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )
        assert gradgradcheck(function, leaves)
    a, b = (x.detach() for x in leaves)
    per_sample = torch.vmap(torch.func.grad(lambda a, b: float32_product(a, b).square().sum()))(
        a, b
    )
    joint = torch.func.grad(lambda a: (a @ b).square().sum())(a)
    torch.testing.assert_close(per_sample, joint)
