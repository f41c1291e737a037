"""ESM-C, OLMo-core and vortex as published: what each calls of the engine, beside its own PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "esm": ("esm", "attr", "accelerate", "pandas"),
    "olmo_core": ("olmo_core", "cached_path", "dill"),
    "vortex": ("vortex",),
}


@pytest.mark.clients
@pytest.mark.parametrize("client", CASES)
def test_a_small_client_computes_what_its_own_pytorch_does(client: str, tmp_path: Path):
    absent = [name for name in NEEDED[client] if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed; `make test-clients` installs it")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(CASES[client])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
