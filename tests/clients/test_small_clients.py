"""Published clients that use a part of the package: each one's cases and its example in docs/other_clients.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.processes import run
from tests.clients.small_cases import CASES
from tests.support.programs import ROOT

NEEDED = {
    "nemo_automodel": ("nemo_automodel", "transformers"),
    "modelopt": ("modelopt", "omegaconf"),
    "esm": ("esm", "attr", "accelerate", "pandas"),
    "olmo_core": ("olmo_core", "cached_path", "dill"),
    "vortex": ("vortex",),
    "composer": ("composer", "torchvision"),
    "thunder": ("thunder", "looseversion", "optree"),
    "physicsnemo": ("physicsnemo", "warp", "pyvers"),
}
EXAMPLES = re.findall(
    r"```python-clients\n(.*?)```", (ROOT / "docs" / "other_clients.md").read_text(), re.DOTALL
)
EXAMPLE_OF = dict(zip(NEEDED, EXAMPLES, strict=True))  # the page has the clients in this order
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Every case has separate variables. A traceback names the case as its file.
DRIVER = """
import torch

for name, (source, device) in {programs!r}.items():
    torch.set_default_device(device)
    exec(compile(source, name, "exec"), {{"__name__": "__main__", "device": device}})
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
"""


@pytest.mark.clients
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("client", NEEDED)
def test_a_client_computes_what_its_own_pytorch_does(client: str, device: str, tmp_path: Path):
    """One process for each client: the example of the page as printed, then the cases on the device."""
    programs = {"docs/other_clients.md": (EXAMPLE_OF[client], None)}
    programs |= {
        name: ("\n".join(parts), device) for name, parts in CASES.items() if name.split()[0] == client
    }
    assert len(programs) > 1 and client in EXAMPLE_OF[client]
    run(DRIVER.format(programs=programs), NEEDED[client], tmp_path)
