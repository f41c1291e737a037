"""Fixtures of every test: a device, a seed, and no quantization state left over from another test."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from tests.support.cases import mark_all_but_samples_slow
from transformer_engine.pytorch.distributed import set_all_rng_states
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, emulate


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def emulated():
    """Every recipe runs, by emulation where the hardware lacks its format."""
    with emulate():
        yield


@pytest.fixture(autouse=True)
def _fresh_state():
    torch.manual_seed(0)
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()
    set_all_rng_states({})  # of the tracker that a test used last
    if _full_collections() > _collections_seen:
        _exempt_from_collection(least=100_000)


def pytest_configure(config: pytest.Config) -> None:
    """Collect tests without garbage collection, and omit slow actions that have no effect on tests.

    The two million objects of modules and collected tests stay alive: visiting them takes 2 of 13 seconds.
    torch.manual_seed queues a seed and formats a stack trace for each type of device that is absent: 2 milliseconds.
    Tests call it more than ten thousand times. torch.compile flushes the caches of the processor to measure the latency
    of the guards of each graph for its log: 80 milliseconds, a twelfth of the compilation of a layer.
    """
    if config.getoption("dist", "no") == "no":  # otherwise the workers of pytest-xdist collect
        gc.disable()
    torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
    # The deletion of an earlier test's CUDA graph during a capture would end the capture with an error.
    if hasattr(torch.compiler.config, "force_cudagraph_gc"):
        torch.compiler.config.force_cudagraph_gc = True
    for module in (torch.cuda, torch.xpu, torch.mtia):
        if not module.is_available():
            module.manual_seed_all = lambda seed: None  # pyright: ignore[reportAttributeAccessIssue]


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_all_but_samples_slow(items)
    if torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("any_device") is not None:
                item.add_marker(pytest.mark.gpu)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # not `keywords`, which name folders too
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    _propagate_logs()


_collections_seen = 0  # full garbage collections


def _full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def _exempt_from_collection(least: int) -> None:
    """Exempt the existing objects from garbage collection if there are at least `least`.

    Otherwise each full collection, which many tests and torch._dynamo request, visits caches of the compiler and
    reports of tests for 0.3 seconds, as it would the objects of modules and collected tests for 1.6 seconds.
    """
    global _collections_seen
    if len(gc.get_objects()) >= least:
        gc.collect()
        gc.freeze()
    _collections_seen = _full_collections()


def _propagate_logs() -> None:
    """Let the loggers of libraries propagate to the root logger, where pytest captures their records.

    pytest adds its two handlers to each logger that does not propagate, and removes them, three times per test. torch
    has 44 of these loggers.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
