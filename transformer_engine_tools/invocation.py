"""The `te` command form that works where its hints are printed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """The command that started this process: `te` if the shell finds it, otherwise its path or `python -m`."""
    script = Path(sys.argv[0])
    if script.stem != "te":
        return f"{_interpreter()} -m transformer_engine"
    on_path = shutil.which("te")
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(script):
        return "te"
    return str(script)


def _interpreter() -> str:
    """Name of the running interpreter if the shell finds it under that name, otherwise its path."""
    name = Path(sys.executable).name
    on_path = shutil.which(name)
    # A virtual environment's interpreter is a link to the system interpreter: compare unresolved paths.
    return name if on_path is not None and Path(on_path) == Path(sys.executable) else sys.executable
