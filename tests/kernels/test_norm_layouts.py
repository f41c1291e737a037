"""A norm that makes FP8 codes, or a maximum, sums its rows in the order of the norm that makes numbers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_rows_are_dealt_to_threads_alike_whatever_is_stored():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "norm_layouts.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 24
    assert all(variants[0] for variants in found.values())
    differing = [case for case, (plain, *others) in found.items() if any(other != plain for other in others)]
    assert differing == []
