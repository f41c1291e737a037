"""A warm layer caches its product plans and chooses again as soon as the choice may differ."""

from __future__ import annotations

import pytest
import torch

from tests.support.layers import LAYERS, same, sample, step
from tests.support.plans import PlanByAddress
from transformer_engine.common.dispatch import Backend, observing, use_backend
from transformer_engine.pytorch.primitives.gemm import TABLE
from transformer_engine.pytorch.primitives.gemm.request import EPILOGUES


class Library:
    """A backend with the highest priority, whose plans a layer caches like cuBLASLt's."""

    rejection: str | None = None

    @classmethod
    def unsupported_reason(cls, request):
        return cls.rejection if request.a_element is torch.bfloat16 else "it multiplies bfloat16"


@pytest.fixture
def library(monkeypatch):
    backend = Backend(
        "library",
        takes=EPILOGUES,
        unsupported_reason=Library.unsupported_reason,
        bind=lambda request: PlanByAddress(request).run,
    )
    monkeypatch.setattr(TABLE, "backends", (backend, *TABLE.backends))
    monkeypatch.setattr(Library, "rejection", None)
    PlanByAddress.made = PlanByAddress.runs = 0
    TABLE.forget()
    yield Library
    TABLE.forget()


@pytest.fixture(params=LAYERS)
def warm(request, library):
    """A warmed-up layer as a function that returns its results and how many products the library computed."""
    layer = LAYERS[request.param](params_dtype=torch.bfloat16, device="cpu")
    x = sample("cpu", dtype=torch.bfloat16)

    def call():
        before = PlanByAddress.runs
        return step(layer, x), PlanByAddress.runs - before

    for _ in range(4):
        call()
    result = PlanByAddress.made
    first, runs = call()
    assert runs > 0 and PlanByAddress.made == result
    call.first, call.runs = first, runs
    return call


def test_a_cleared_plan_is_not_used(warm, library):
    library.rejection = "it has been taken away"
    TABLE.forget()
    result, runs = warm()
    assert runs == 0 and len(result) == len(warm.first)
    library.rejection = None
    assert warm()[1] == 0  # the choice is cached until the table is cleared
    TABLE.forget()
    repeated, runs = warm()
    assert runs == warm.runs and same(repeated, warm.first)


def test_a_forced_backend_is_used_inside_the_context_only(warm):
    for name in ("reference", "matmul", "library"):
        with use_backend(gemm=name):
            assert (warm()[1] > 0) == (name == "library")
        repeated, runs = warm()
        assert runs == warm.runs and same(repeated, warm.first)


def test_a_forced_backend_that_rejects_the_call_raises(warm, library):
    library.rejection = "it has been taken away"
    with use_backend(gemm="library"), pytest.raises(RuntimeError, match="it has been taken away"):
        warm()


def test_an_observer_sees_products_with_cached_plans(warm):
    records = []
    with observing(lambda operation, request: records.append(operation)):
        warm()
    assert records.count("gemm") == warm.runs
    repeated, runs = warm()
    assert runs == warm.runs and same(repeated, warm.first)
