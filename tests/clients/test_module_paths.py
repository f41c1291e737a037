"""Module paths from earlier releases can be imported: they exist, or another path loads the same module."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from transformer_engine.pytorch.compat import OLD_PATHS

# All modules of the commit in which modules began to move, one per line.
RECORDED = Path(__file__).with_name("module_paths.txt").read_text(encoding="utf-8").split()
JAX = importlib.util.find_spec("jax") is not None
if JAX:
    from transformer_engine.jax._old_paths import OLD_PATHS as JAX_OLD_PATHS
else:
    JAX_OLD_PATHS = {}


def test_recorded_paths_are_found():
    excluded = () if JAX else ("transformer_engine.jax", "transformer_engine_jax")
    paths = [path for path in RECORDED if not path.startswith(excluded)]
    assert len(paths) > 700
    assert [path for path in paths if importlib.util.find_spec(path) is None] == []


@pytest.mark.parametrize("path", [*OLD_PATHS, *JAX_OLD_PATHS])
def test_an_old_path_loads_the_module_of_the_present_path(path: str):
    assert path in RECORDED
    module = importlib.import_module(path)
    present = {**OLD_PATHS, **JAX_OLD_PATHS}[path]
    assert module is importlib.import_module(present)
    assert module.__name__ == module.__spec__.name == present  # pyright: ignore[reportOptionalMemberAccess]
    package, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(package), name) is module


def test_an_old_path_of_a_package_loads_the_same_modules():
    for name in ("", ".plan", ".bench.measure"):
        old, present = f"transformer_engine.cli{name}", f"transformer_engine_tools{name}"
        assert importlib.import_module(old) is importlib.import_module(present)
    assert importlib.util.find_spec("transformer_engine.cli.no_such_command") is None
