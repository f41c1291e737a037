"""A line starts what its pass starts, on the same: shown without a GPU, by what kernels would read and write."""

from __future__ import annotations

import importlib.util
import json

import pytest
from support.programs import output_without_gpu


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_steps_by_lines_leave_what_steps_by_passes_leave():
    done = output_without_gpu("tests/module/started_by_lines.py")
    found = json.loads(done.splitlines()[-1])
    assert len(found) == 43
    assert {case: what for case, what in found.items() if what is not None} == {}
