"""The examples of the pages on accelerate, Lightning, peft and Hugging Face, each page in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import installed
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning",),
    "peft": ("peft", "transformers"),
    "huggingface": ("transformers",),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=installed.needs(*clients)) for page, clients in PAGES.items()]
)
def test_the_examples_of_a_page_run(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    examples = re.findall(r"```python-clients\n(.*?)```", text, re.DOTALL)
    assert examples
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
