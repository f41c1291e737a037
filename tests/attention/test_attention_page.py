"""The attention page shows the choices of the backends and the measurements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_attention_page_is_up_to_date():
    script = ROOT / "docs" / "attention_table.py"
    result = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
