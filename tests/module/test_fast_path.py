"""With TE_FAST=0, layers and operations are bitwise unchanged, and nothing from `pytorch/fast` runs."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from tests.support.programs import ROOT, output, search_path

# Prints which pieces are active in warm layers and chains on a simulated GPU.
PIECES = """
import json, sys, threading
import torch
sys.path.insert(0, "benchmarks")
import fast_pieces, host_calls, pretended_gpu
from transformer_engine.common import env
from transformer_engine.pytorch import fast, ops

pretended_gpu.pretend()
compiled = {}
for name in ("linear", "layernorm_linear", "layernorm_mlp", "chain"):
    made = []
    build = fast_pieces.MODULES[name]
    work = host_calls.passes(lambda: made.append(build()) or made[0], host_calls.RECIPES["current"](), True)
    for _ in range(3):
        work()
    specs = [s for m in made[0].modules() for s in getattr(m, "_specs", {}).values()]
    if name == "chain":
        (fuser,) = made[0]._module_groups
        specs = list(fuser._prepared.values())
    kinds = [k for s in specs if s.compiled for p in s.compiled.passes for k in p.kinds.values()]
    compiled[name] = sum(kind.generated is not None for kind in kinds)

torch.cuda.device_count = lambda: 1
threads = torch._C._is_multithreading_enabled()
fast.run_backward_on_calling_thread()
print(json.dumps({
    "compiled": compiled,
    "backward thread": threads and not torch._C._is_multithreading_enabled(),
    "environment": env._stored_text != __import__("os").environ.get,
}))
"""


def _run_script(fast: str, *arguments: str) -> dict:
    rest = {
        name: text for name, text in os.environ.items() if not name.startswith(("TE_", "NVTE_"))
    }
    environment = rest | {"PYTHONPATH": search_path(), "TE_FAST": fast}
    return json.loads(output(["-W", "ignore", *arguments], ROOT, environment, 600).splitlines()[-1])


@pytest.mark.any_device
def test_layers_and_chains_have_equal_bits_without_the_fast_path():
    program = "tests/module/fast_path_results.py"
    fast, plain = _run_script("1", program), _run_script("0", program)
    assert len(fast) >= 60
    assert {name for name in fast | plain if fast.get(name) != plain.get(name)} == set()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_switch_disables_every_piece():
    names = ("linear", "layernorm_linear", "layernorm_mlp", "chain")
    fast, plain = _run_script("1", "-c", PIECES), _run_script("0", "-c", PIECES)
    assert fast == {
        "compiled": dict.fromkeys(names, 2),
        "backward thread": True,
        "environment": True,
    }
    assert plain == {
        "compiled": dict.fromkeys(names, 0),
        "backward thread": False,
        "environment": False,
    }
