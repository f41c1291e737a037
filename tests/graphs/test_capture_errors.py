"""The error from a body that cannot be captured reaches the caller, though ending the capture fails too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transformer_engine.pytorch.runtime import capture


class FailingCapture:
    """torch.cuda.graph: its end raises after an error in its body, or always if `invalidated`."""

    invalidated = False

    def __init__(self, graph: Any, **options: Any) -> None:
        self.is_empty = "pool" not in options  # the capture that resets the random generators

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *error: Any) -> None:
        if not self.is_empty and (kind is not None or self.invalidated):
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )


@pytest.fixture
def recorder(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    for name in ("CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: stream)
    monkeypatch.setattr(torch.cuda, "graph", FailingCapture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda other: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(capture, "_capture_stream", lambda device: stream)
    return capture.CudaRecorder()


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing"), KeyError("x")]
)
def test_a_bodys_error_is_raised(recorder, error):
    def body():
        raise error

    with pytest.raises(type(error)) as raised:
        recorder.record(body)
    assert raised.value is error


def test_an_invalidated_capture_names_work_outside_of_the_stream(recorder, monkeypatch):
    monkeypatch.setattr(FailingCapture, "invalidated", True)
    with pytest.raises(RuntimeError, match="work outside of the captured stream took part"):
        recorder.record(lambda: ())
