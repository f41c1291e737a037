"""Where Triton kernel tests run: on a GPU, or with TRITON_INTERPRET=1 interpreted, on small shapes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter warns of overflows that kernels mean to have.
runs_kernels = (
    pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
)


def parametrize_sizes(
    names: str, small: Sequence[Any], large: Sequence[Any], **options: Any
) -> pytest.MarkDecorator:
    """Parametrize over small shapes, and on a GPU over large shapes too."""
    return pytest.mark.parametrize(names, [*small] if INTERPRETED else [*small, *large], **options)
