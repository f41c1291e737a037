"""Operators report their results' shapes and dtypes to a compiler, also for a GPU that is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from transformer_engine.common import dispatch
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.common.operation_settings import Labels
from transformer_engine.pytorch.primitives import column_sums as sums
from transformer_engine.pytorch.primitives import cross_entropy as losses
from transformer_engine.pytorch.primitives import quantize as quantization
from transformer_engine.pytorch.primitives.gemm import Epilogue, fused, plain, product
from transformer_engine.pytorch.primitives.gemm.composed import GELU, GELU_GRADIENT, FusedRequest
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec
from transformer_engine.pytorch.primitives.quantize.format_row import QuantizeInputs

M, N, K = 64, 48, 32
HALF = torch.bfloat16
SPECS = {
    "float8": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "float8 columns": QuantizeSpec(FLOAT8, E5M2, rowwise=False, columnwise=True),
    "block1d": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True),
    "block2d": QuantizeSpec(BLOCK_2D, E4M3),
    "mxfp8": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
}

Case = tuple[dispatch.Table[Any], Any, tuple[Any, ...]]


def sums_case() -> Case:
    x = torch.randn(M, N, dtype=HALF)
    request = sums.ColumnSumsRequest((M, N), (N, 1), HALF, torch.float32, x.device)
    return sums.TABLE, request, (x,)


def product_case(**epilogue: Any) -> Case:
    a, b, requested = (
        plain(torch.randn(M, K, dtype=HALF)),
        plain(torch.randn(N, K, dtype=HALF)),
        Epilogue(HALF),
    )
    requested = requested._replace(**epilogue)
    return product.TABLE, GemmRequest.of(a, b, requested), (a, b, requested)


def gelu_case(keeps: bool) -> Case:
    _, _, (a, b, epilogue) = product_case()
    return fused.TABLE, FusedRequest.of(GELU, a, b, epilogue, keeps, None, None), (a, b, epilogue)


def gradient_case() -> Case:
    _, _, (a, b, epilogue) = product_case()
    x = torch.randn(M, N, dtype=HALF)
    request = FusedRequest.of(GELU_GRADIENT, a, b, epilogue, False, x, HALF)
    return fused.TABLE, request, (a, b, epilogue, x)


def quantize_case(name: str, scaled: bool = False) -> Case:
    x, scale = torch.randn(M, N, dtype=HALF), torch.ones(1) if scaled else None
    request = quantization.QuantizeRequest(SPECS[name], (M, N), HALF, x.device, scaled)
    return quantization.TABLE, request, (x, QuantizeInputs(scale))


def loss_case(operation: str) -> Case:
    x, targets = torch.randn(M, N, dtype=HALF), torch.randint(0, N, (M,))
    request = losses.CrossEntropyRequest(operation, M, N, HALF, x.device, Labels(-100, 0.1, 0, N))
    tensors = {
        "statistics": (x, targets),
        "losses": (torch.rand(1, M, 4), targets),
        "gradient": (x, targets, torch.ones(M, 2), torch.ones(1)),
        "rescale": (x, torch.full((1,), 0.5)),
    }
    return losses.TABLE, request, tensors[operation]


CASES: dict[str, Callable[[], Case]] = {
    "column sums": sums_case,
    "product": product_case,
    "product with a bias": lambda: product_case(bias=torch.randn(N)),
    "product into": lambda: product_case(out=torch.randn(M, N), accumulate=True),
    "gelu": lambda: gelu_case(True),
    "gelu alone": lambda: gelu_case(False),
    "gradient of gelu": gradient_case,
    "statistics of logits": lambda: loss_case("statistics"),
    "losses": lambda: loss_case("losses"),
    "gradient of logits": lambda: loss_case("gradient"),
    "rescaled gradient": lambda: loss_case("rescale"),
    "quantize float8 scaled": lambda: quantize_case("float8", True),
    **{f"quantize {name}": lambda name=name: quantize_case(name) for name in SPECS},
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_on_a_fake_gpu_returns_the_references_shapes(name: str):
    table, request, arguments = CASES[name]()
    expected = tree_leaves(table.backends[-1].bind(request)(*arguments))
    with FakeTensorMode():
        remote = tree_map(
            lambda x: fake_gpu_tensor(x) if isinstance(x, torch.Tensor) else x, arguments
        )
        result = tree_leaves(table.operator(request).call(*remote))
    pairs = [
        (x, y) for x, y in zip(result, expected, strict=True) if x is not None or y is not None
    ]
    assert pairs
    for ours, reference in pairs:
        assert (ours.shape, ours.dtype) == (reference.shape, reference.dtype)
        assert ours.device.type == "cuda"


def fake_gpu_tensor(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


@pytest.mark.parametrize(
    "table", [product.TABLE, quantization.TABLE], ids=lambda table: table.operation
)
def test_an_undeclared_feature_is_rejected_by_every_backend(table, monkeypatch):
    case = product_case() if table is product.TABLE else quantize_case("float8")
    request = case[1]
    assert table.chosen(request)
    monkeypatch.setattr(type(request), "features", ("a rotation",))
    with pytest.raises(dispatch.Unsupported) as raised:
        table.chosen(request)
    assert str(raised.value).count("it does not support a rotation") == len(table.backends)
