"""Graphs are recorded on the CPU; every recipe runs, by emulation where the hardware lacks it."""

from __future__ import annotations

import pytest
import torch

from tests.support.recorder import CaptureRecorder, RerunRecorder
from transformer_engine.pytorch.graphs import automatic, build
from transformer_engine.pytorch.optimizers import checks


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """Enable emulation in every test of this folder."""


@pytest.fixture
def rerun(monkeypatch):
    """Replace the recorders in make_graphed_callables and te.graphed by recorders that share a log."""
    return _install(monkeypatch, RerunRecorder())


@pytest.fixture
def capture(monkeypatch):
    """Replace te.graphed's recorders by recorders that record operations, and nothing that the host does."""
    real = checks.one_number
    # As for tensors on a GPU, whose values an optimizer does not read.
    monkeypatch.setattr(
        checks,
        "one_number",
        lambda name, value: None if torch.is_tensor(value) else real(name, value),
    )
    return _install(monkeypatch, CaptureRecorder())


def _install(monkeypatch, recorder):
    monkeypatch.setattr(build, "graph_recorder", recorder.in_pool)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    return recorder
