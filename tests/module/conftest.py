"""Every recipe runs in these tests, by emulation where the hardware lacks its format."""

from __future__ import annotations

import pytest

from transformer_engine.pytorch.quantization import emulate


@pytest.fixture(autouse=True)
def _emulation():
    with emulate():
        yield
