"""Graphs are recorded by running again, on the CPU; every recipe runs, by emulation where the hardware lacks it."""

from __future__ import annotations

import pytest

from tests.support.recorder import CaptureRecorder, RerunRecorder
from transformer_engine.pytorch.graphs import automatic, build


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """Enable emulation in every test of this folder."""


@pytest.fixture
def rerun(monkeypatch):
    """Replace the recorders of make_graphed_callables and te.graphed by ones that share a log."""
    made = RerunRecorder()
    monkeypatch.setattr(build, "graph_recorder", lambda pool=None: made)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    return made


@pytest.fixture
def capture(monkeypatch):
    """Replace the recorders of te.graphed by ones whose recordings change no memory before their first replay."""
    made = CaptureRecorder()
    monkeypatch.setattr(build, "graph_recorder", lambda pool=None: made)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    return made
