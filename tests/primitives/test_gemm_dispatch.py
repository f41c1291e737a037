"""A warm product is one cache lookup; forced backends, observers and mistakes are noticed all the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transformer_engine.common.dispatch import observing, use_backend
from transformer_engine.pytorch.primitives.gemm import TABLE, Epilogue, gemm, plain, product


@pytest.fixture
def described(monkeypatch):
    """A list that records each described request; the cache is empty at first."""
    records = []
    describe = TABLE.describe

    def note(*key):
        request = describe(*key)
        records.append(request)
        return request

    monkeypatch.setattr(TABLE, "describe", note)
    TABLE.forget()
    yield records
    TABLE.forget()


def operands(device, m=16, n=32, k=48, dtype=torch.bfloat16):
    return plain(torch.randn(m, k, device=device).to(dtype)), plain(
        torch.randn(n, k, device=device).to(dtype)
    )


def test_a_backend_is_selected_once_for_equal_signatures(described, device):
    a, b = operands(device)
    c, d = operands(device)
    first = gemm(a, b, Epilogue(torch.bfloat16))
    assert torch.equal(gemm(a, b, Epilogue(torch.bfloat16)), first)
    gemm(c, d, Epilogue(torch.bfloat16))
    assert len(described) == 1


def test_each_property_that_a_backend_checks_is_selected_separately(described, device):
    a, b = operands(device)
    bias, out = torch.zeros(32, device=device), torch.zeros(16, 32, device=device)
    calls = [
        (a, b, Epilogue(torch.bfloat16)),
        (a, b, Epilogue(torch.float32)),
        (a, b, Epilogue(torch.bfloat16, exact=False)),
        (a, b, Epilogue(torch.bfloat16, bias=bias)),
        (a, b, Epilogue(torch.bfloat16, bias=bias.bfloat16())),
        (a, b, Epilogue(torch.bfloat16, out=out)),
        (a, b, Epilogue(torch.bfloat16, out=out, accumulate=True)),
        (a, b, Epilogue(torch.bfloat16, out=out.bfloat16())),
        (a, plain(b.codes.t().contiguous().t()), Epilogue(torch.bfloat16)),
        (*operands(device, m=17), Epilogue(torch.bfloat16)),
        (*operands(device, dtype=torch.float32), Epilogue(torch.float32)),
        (plain(torch.nn.Parameter(a.codes)), b, Epilogue(torch.bfloat16)),
    ]
    with torch.no_grad():
        for _ in range(2):
            for call in calls:
                gemm(*call)
    assert len(described) == len(calls)


def test_a_forced_backend_is_used_though_the_call_is_warm(described, device, monkeypatch):
    a, b = operands(device)
    ran, chosen = [], TABLE.named("reference")
    gemm(a, b, Epilogue(torch.bfloat16))
    noting = dataclasses.replace(
        chosen, bind=lambda request: ran.append(request) or chosen.bind(request)
    )
    monkeypatch.setattr(TABLE, "backends", (*TABLE.backends[:-1], noting))
    with use_backend(gemm="reference"):
        gemm(a, b, Epilogue(torch.bfloat16))
        gemm(a, b, Epilogue(torch.bfloat16))
    assert ran == [described[0]]
    assert len(described) == 3
    gemm(a, b, Epilogue(torch.bfloat16))
    assert len(described) == 3  # the forced choice did not replace the cached one


def test_an_observer_sees_every_warm_call(described, device):
    a, b = operands(device)
    gemm(a, b, Epilogue(torch.bfloat16))
    records = []
    with observing(lambda operation, request: records.append((operation, request.m))):
        for _ in range(3):
            gemm(a, b, Epilogue(torch.bfloat16))
    assert records == [("gemm", 16)] * 3


def test_the_call_cache_is_bounded(described, device, monkeypatch):
    monkeypatch.setattr(TABLE._bound, "most", 3)
    for m in range(1, 9):
        gemm(*operands(device, m=m), Epilogue(torch.bfloat16))
        assert len(TABLE._bound) <= 3


@pytest.mark.parametrize(
    ("epilogue", "what"),
    [
        (
            lambda d: Epilogue(torch.bfloat16, bias=torch.zeros(31, device=d)),
            r"bias has shape \(31,\)",
        ),
        (
            lambda d: Epilogue(torch.bfloat16, out=torch.zeros(32, 16, device=d)),
            r"out has shape \(32, 16\)",
        ),
        (
            lambda d: Epilogue(torch.bfloat16, out=torch.zeros(16, 32, device="meta")),
            "out is on meta",
        ),
    ],
    ids=["bias", "out", "device"],
)
def test_an_epilogue_that_does_not_fit_is_an_error(device, epilogue, what):
    with pytest.raises(ValueError, match=what):
        gemm(*operands(device), epilogue(device))


def test_operands_on_two_devices_are_an_error(device):
    a, b = operands(device)
    with pytest.raises(ValueError, match="b is on meta"):
        gemm(a, plain(b.codes.to("meta")), Epilogue(torch.bfloat16))


def test_graph_operators_equal_gemm(device):
    a, b = operands(device)
    bias = torch.randn(32, device=device).bfloat16()
    tensors = (a.codes, None, None, None, b.codes, None, None, None, bias)
    expected = gemm(a, b, Epilogue(torch.bfloat16, bias))
    assert torch.equal(product._product_now(*tensors, torch.bfloat16, True), expected)
    fake = product._product_results(*tensors, torch.bfloat16, True)
    assert (fake.shape, fake.dtype, fake.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    )
    first, second = (torch.ones(16, 32, device=device) for _ in range(2))
    gemm(a, b, Epilogue(torch.float32, bias, out=first, accumulate=True))
    product._product_into_now(second, *tensors, True, True)
    assert torch.equal(first, second)
