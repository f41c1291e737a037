"""A pytest plugin: with TRITON_INTERPRET=1 the kernels' tests run on the CPU, in Triton's repaired interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import repair
from transformer_engine.pytorch.runtime import launching


def pytest_configure() -> None:
    repair()
    # Two: several programs share the rows, each has several.
    launching.processors = lambda device: launching.Processors(2, 1 << 16)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one float16 case of each test: kernels differ from those of bfloat16 in loads and stores only."""
    seen: set[Callable[..., Any]] = set()
    kept, dropped = [], []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        function = getattr(item, "function", None)
        half = params.get("dtype") is torch.float16 and "fused" not in item.path.name
        (dropped if half and function in seen else kept).append(item)
        if half and function is not None:
            seen.add(function)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
