"""Programs of clients, each in a process of its own: what a client replaces in torch stays there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output(arguments: list[str], folder: Path) -> str:
    """What Python prints for these arguments; its last words as the failure's message where it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(program: str, needed: tuple[str, ...], folder: Path) -> str:
    """The program's output; skipped where what it needs is not installed."""
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed; `make test-clients` installs it")
    return output(["-c", program], folder)
