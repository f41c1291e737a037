"""Unmodified clients that use a part of the package: the calls of each, against its own PyTorch code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.processes import run
from tests.clients.small_cases import CASES

NEEDED = {
    "esm": ("esm", "attr", "accelerate", "pandas"),
    "olmo_core": ("olmo_core", "cached_path", "dill"),
    "vortex": ("vortex",),
    "nemo_automodel": ("nemo_automodel", "transformers"),
    "modelopt": ("modelopt", "omegaconf"),
    "composer": ("composer", "torchvision"),
    "thunder": ("thunder", "looseversion", "optree"),
    "physicsnemo": ("physicsnemo", "warp", "pyvers"),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.clients
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_small_client_computes_what_its_own_pytorch_does(case: str, device: str, tmp_path: Path):
    begin = f"import torch\ndevice = {device!r}\ntorch.set_default_device(device)\n"
    run("\n".join((begin, *CASES[case])), NEEDED[case.split()[0]], tmp_path)
