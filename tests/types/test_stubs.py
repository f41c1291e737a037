"""mypy's stubtest: signatures and attributes that type checkers read are those of the imported modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.types.checkers import PACKAGES, ROOT, UNREAD
from tests.types.stub_differences import ALLOWED, is_cached, matching_rule

# The sample has no subclass of their classes, and reading them takes four times as long as reading this package.
LIBRARIES = (
    "torch",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    *(name for name in UNREAD if "." not in name),
)
SAMPLE = ("transformer_engine.common.recipe", "transformer_engine_jax")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed"),
]


def differences(
    packages: tuple[str, ...], folder: Path, skipped: tuple[str, ...] = ()
) -> list[str]:
    """Lines of `stubtest --concise` for the modules of packages, except for functions under `functools.cache`.

    Args:
        packages: Packages and modules to compare.
        folder: Folder for mypy's settings.
        skipped: Libraries whose types are not read.
    """
    settings = folder / "mypy.ini"
    lines = [
        "[mypy]",
        "ignore_errors = True",
        "ignore_missing_imports = True",
        "follow_imports = silent",
    ]
    for name in skipped:
        lines += [f"[mypy-{name}.*,{name}]", "follow_imports = skip"]
    settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--concise", "--mypy-config-file", str(settings)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *options, *packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == bool(lines) and all(line.startswith(PACKAGES) for line in lines), (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
    cached = {name: is_cached(name) for name in {line.split()[0] for line in lines}}
    return [line for line in lines if not cached[line.split()[0]]]


def test_stubtest_reports_no_other_difference_in_recipes_and_the_jax_extension(tmp_path: Path):
    result = differences(SAMPLE, tmp_path, LIBRARIES)
    assert len(result) > 50  # of `__new__` of the recipes
    assert not [line for line in result if matching_rule(line) is None]


@pytest.mark.slow
def test_stubtest_reports_no_other_difference_in_any_module(tmp_path: Path):
    result = differences(PACKAGES, tmp_path)
    rules = {line: matching_rule(line) for line in result}
    assert not [line for line, rule in rules.items() if rule is None]
    assert set(rules.values()) == set(ALLOWED), "a reason that no difference needs"
