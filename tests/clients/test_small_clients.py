"""ESM-C, OLMo-core and vortex as published: what each calls of the engine, beside its own PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run
from small_cases import CASES

NEEDED = {
    "esm": ("esm", "attr", "accelerate", "pandas"),
    "olmo_core": ("olmo_core", "cached_path", "dill"),
    "vortex": ("vortex",),
}


@pytest.mark.clients
@pytest.mark.parametrize("client", CASES)
def test_a_small_client_computes_what_its_own_pytorch_does(client: str, tmp_path: Path):
    run("\n".join(CASES[client]), NEEDED[client], tmp_path)
