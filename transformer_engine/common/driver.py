"""Version of NVIDIA's driver, without a framework."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path


@functools.cache
def driver_version() -> str | None:
    """Version of NVIDIA's driver, such as "580.65.06"; None without a driver."""
    kernel = Path("/proc/driver/nvidia/version")
    if kernel.is_file():
        version = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", kernel.read_text(encoding="utf-8"))
        return version.group(1) if version else "of unknown version"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None
