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
    """PYTHONPATH with these folders, this repository, and the current PYTHONPATH."""
    return os.pathsep.join(
        filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")))
    )


def output(
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str],
    patience: float | None = None,
) -> str:
    """Run Python with these arguments and return its output; if it fails, raise with the output's end."""
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
    """Environment for a program whose kernels Triton interprets on the CPU."""
    return {
        **os.environ,
        "PYTHONPATH": search_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        **more,
    }


def output_without_gpu(*arguments: str, patience: float = 300) -> str:
    """Run a program from this repository without a GPU and return its output.

    Our environment variables are unset, because each function call reads them.
    """
    unset = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    environment = unset | {"PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""}
    return forked.output(["-W", "ignore", *arguments], ROOT, environment, patience=patience)
