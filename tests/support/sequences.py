"""Lengths as tensors, and calls whose numbers are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import transformer_engine.pytorch as te


def int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def rejects(match: str, call: Callable[[], object]) -> None:
    """Assert that the call, or the number check that follows it, raises a ValueError with these words."""
    with pytest.raises(ValueError, match=match):
        call()
        te.check()
