"""Every recipe runs in these tests, by emulation where the hardware lacks its format."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _emulation(emulated):
    """Enable emulation in every test of this folder."""
