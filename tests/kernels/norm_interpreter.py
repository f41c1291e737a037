"""A pytest plugin: with TRITON_INTERPRET=1 the kernels' tests run on the CPU, in Triton's repaired interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import keep_cover, repair
from transformer_engine.pytorch.runtime import launching


def pytest_configure() -> None:
    repair()
    # Two: several programs share the rows, each has several.
    launching.processors = lambda device: launching.Processors(2, 1 << 16)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_cover(config, items)
