"""Programs of the tree, each in a process of its own that sees no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("TE_", "NVTE_", "TRITON_")


def output_without_gpu(*arguments: str) -> str:
    """What Python prints for these arguments; its last words as the failure's message where it fails.

    Without our environment variables: one that is set is read at every call.
    """
    unset = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=unset | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
