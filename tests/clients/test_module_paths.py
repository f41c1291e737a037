"""Every path of a module of an earlier release can be imported: it exists, or another path loads the same module."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from transformer_engine.pytorch.compat import OLD_PATHS

# All modules of the commit in which modules began to move, one per line.
RECORDED = Path(__file__).with_name("module_paths.txt").read_text(encoding="utf-8").split()


def test_recorded_paths_are_found():
    frameworks = ("transformer_engine.jax", "transformer_engine_jax")
    paths = [path for path in RECORDED if not path.startswith(frameworks)]
    assert len(paths) > 700
    assert [path for path in paths if importlib.util.find_spec(path) is None] == []


@pytest.mark.parametrize("path", OLD_PATHS)
def test_an_old_path_loads_the_module_of_the_present_path(path: str):
    assert path in RECORDED
    module = importlib.import_module(path)
    assert module is importlib.import_module(OLD_PATHS[path])
    assert module.__name__ == module.__spec__.name == OLD_PATHS[path]  # pyright: ignore[reportOptionalMemberAccess]
    package, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(package), name) is module
