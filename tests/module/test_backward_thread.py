"""Backward passes stay on the calling thread in a process that uses one GPU."""

from __future__ import annotations

import threading

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.fast_path import needs_fast_path
from transformer_engine.pytorch import fast

pytestmark = needs_fast_path


class ThreadOfBackward(torch.autograd.Function):
    """Identity that records the thread of its backward pass."""

    seen: list[int] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        ThreadOfBackward.seen.append(threading.get_ident())
        return grad


@pytest.fixture
def in_new_thread():
    """Run a function on a thread that has torch's defaults."""

    def run(function):
        results = []
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join()
        return results[0]

    return run


def multithreading_enabled() -> bool:
    return torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    ("devices", "variable", "expected"),
    [(1, None, False), (2, None, True), (1, "1", True), (1, "0", False)],
)
def test_a_process_with_one_gpu_uses_the_calling_thread(
    monkeypatch, in_new_thread, devices, variable, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    if variable is None:
        monkeypatch.delenv("TE_BACKWARD_THREADS", raising=False)
    else:
        monkeypatch.setenv("TE_BACKWARD_THREADS", variable)

    def switched() -> bool:
        fast.run_backward_on_calling_thread()
        return multithreading_enabled()

    assert in_new_thread(switched) is expected


def test_a_caller_that_wants_torchs_threads_keeps_them(monkeypatch, in_new_thread):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def turned_on_again() -> bool:
        fast.run_backward_on_calling_thread()
        torch.autograd.set_multithreading_enabled(True)
        fast.run_backward_on_calling_thread()
        return multithreading_enabled()

    assert in_new_thread(turned_on_again)


def test_other_threads_are_left_alone(monkeypatch, in_new_thread):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = multithreading_enabled()
    in_new_thread(fast.run_backward_on_calling_thread)
    assert multithreading_enabled() is before


@pytest.mark.gpu
def test_the_backward_of_a_layer_runs_on_the_calling_thread(monkeypatch, in_new_thread):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    layer = te.Linear(32, 32, device="cuda")

    def train() -> int:
        ThreadOfBackward.seen.clear()
        x = torch.randn(16, 32, device="cuda", requires_grad=True)
        layer(ThreadOfBackward.apply(x)).sum().backward()
        return threading.get_ident()

    thread = in_new_thread(train)
    assert ThreadOfBackward.seen == [thread]
