"""Where tests of Triton kernels run: on a GPU, or under TRITON_INTERPRET=1 in the interpreter, on small shapes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter warns of overflows that kernels mean to have.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu


def sized(names: str, small: Sequence[Any], large: Sequence[Any], **options: Any) -> pytest.MarkDecorator:
    """A parametrization over small shapes, and on a GPU large ones too."""
    return pytest.mark.parametrize(names, [*small] if INTERPRETED else [*small, *large], **options)
