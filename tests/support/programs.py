"""Programs, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
OURS = ("TE_", "NVTE_", "TRITON_")


def search_path(*folders: Path) -> str:
    """Return a PYTHONPATH of these folders, this repository, and the current PYTHONPATH."""
    return os.pathsep.join(filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH"))))


def output(
    arguments: list[str], folder: Path, environment: Mapping[str, str], patience: float | None = None
) -> str:
    """Return the output of Python for these arguments; if it fails, raise with the end of its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
        timeout=patience,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def interpreting(**more: str) -> dict[str, str]:
    """Return the environment of a program whose kernels Triton interprets on the CPU."""
    return {
        **os.environ,
        "PYTHONPATH": search_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        **more,
    }


def output_without_gpu(*arguments: str, patience: float = 300) -> str:
    """Return the output of a program of this repository that runs without a GPU.

    Our environment variables are unset, because each call of a function reads them.
    """
    unset = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    environment = unset | {"PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""}
    return forked.output(["-W", "ignore", *arguments], ROOT, environment, patience=patience)
