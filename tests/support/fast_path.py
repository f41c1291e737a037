"""A mark for tests on code that exists for host time alone."""

from __future__ import annotations

import pytest

from transformer_engine.pytorch import fast

needs_fast_path = pytest.mark.skipif(
    not fast.ENABLED, reason="tests host calls or compiled passes, which TE_FAST=0 disables"
)
