"""No launch overflows 32-bit arithmetic in an address offset, up to the extents that backends accept."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

LARGEST = (1 << 23) - 128
SHAPES = {"tall": (LARGEST, 256), "wide": (256, LARGEST), "large": (1 << 20, 1 << 13)}


def overflows(shape: tuple[int, int]) -> dict[str, list[str]]:
    """Operations that can overflow, by launch name."""
    command = [sys.executable, "-W", "ignore", str(HERE / "address_bounds.py"), *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["wide", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tall", "large"))]
)
def test_no_launch_overflows_an_offset_up_to_its_limit(name):
    assert overflows(SHAPES[name]) == {}


def test_offsets_that_overflow_are_found():
    from tests.kernels.address_bounds import wrapping_offsets
    from transformer_engine.common.kernels import transpose
    from transformer_engine.common.kernels.launch import LARGEST_EXTENT

    assert not wrapping_offsets(transpose.transpose((512, LARGEST_EXTENT - 1)), ("*u8",))
    # 255 rows with 8,421,505 columns
    result = wrapping_offsets(transpose.transpose((512, 8_421_505)), ("*u8",))
    assert result and all("arith.muli" in line for line in result)
