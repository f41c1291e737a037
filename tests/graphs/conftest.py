"""Graphs are recorded by running again, on the CPU; every recipe runs, by emulation where the hardware lacks it."""

from __future__ import annotations

import pytest

from tests.support.recorder import RerunRecorder
from transformer_engine.pytorch.graphs import automatic, build


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """In every test of this folder."""


@pytest.fixture
def rerun(monkeypatch):
    """What make_graphed_callables and te.graphed record with: all its recorders' logs in one."""
    made = RerunRecorder()
    monkeypatch.setattr(build, "graph_recorder", lambda pool=None: made)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    return made
