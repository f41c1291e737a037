"""A fixture of the tests that train in formats which the machine may lack."""

from __future__ import annotations

import pytest

from transformer_engine.pytorch.quantization import emulate


@pytest.fixture
def emulated():
    """Emulate formats that the hardware lacks."""
    with emulate():
        yield
