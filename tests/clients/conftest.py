"""A fixture of the tests that train in formats which the machine may lack."""

from __future__ import annotations

import pytest

from transformer_engine.pytorch.quantization import emulate


@pytest.fixture
def emulated():
    """Formats that the hardware lacks are computed all the same."""
    with emulate():
        yield
