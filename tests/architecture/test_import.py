"""Importing the package is cheap and does not depend on the import order."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from tests.architecture.source import modules
from tests.support import programs
from tests.support.programs import ROOT
from transformer_engine.pytorch.runtime.tracing import constant_while_tracing

# Packages and subpackages that take long to import. Programs that need them import them, or a feature does when used.
HEAVY = (
    "cudnn",
    "flash_attn",
    "flax",
    "jax",
    "matplotlib",
    "mpmath",
    "networkx",
    "nvmath",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx",
    "torch.testing",
    "transformers",
    "triton",
)
# Other torch and standard library modules that the package loads beyond `import torch`: 7 with torch 2.13.
OTHERS = 20
LAZY = ("conversion", "convert_hf", "cpp_extensions", "integrations", "ops", "revert_hf")


PROGRAMS = {
    "packages": "import transformer_engine, transformer_engine.pytorch, transformer_engine_torch",
    "pytorch": "import transformer_engine.pytorch",
    "lazy": f"from transformer_engine.pytorch import *; {', '.join(LAZY)}",
}
# Each program is forked from a fresh interpreter that has imported torch.
FORKING = """
import json, os, sys, torch
before = set(sys.modules)
for name, program in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        exec(program)
        print(json.dumps([name, *(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """For each program that ends without an error, the modules that it loads in addition to torch's."""
    listing = programs.output(["-c", FORKING, json.dumps(PROGRAMS)], ROOT, os.environ)
    return {name: set(names) for name, *names in map(json.loads, listing.splitlines())}


def is_in_packages(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_import_loads_nothing_heavy_beyond_torch(loaded):
    result = loaded["packages"]
    assert "transformer_engine_torch" in result
    assert not sorted(name for name in result if is_in_packages(name, HEAVY))
    rest = sorted(name for name in result if not name.startswith("transformer_engine"))
    assert len(rest) <= OTHERS, rest


def test_pytorch_package_does_not_load_its_adapters_or_checkpoint_conversion(loaded):
    result = loaded["pytorch"]
    assert "transformer_engine.pytorch" in result
    lazy = ("conversion", "cpp_extensions", "integrations")
    packages = (
        "transformer_engine_torch",
        *(f"transformer_engine.pytorch.{name}" for name in lazy),
    )
    assert not sorted(name for name in result if is_in_packages(name, packages))


def test_lazy_names_are_public_attributes(loaded):
    assert set(LAZY) <= set(dir(te)) and set(LAZY) <= set(te.__all__)
    assert "transformer_engine.pytorch.conversion" in loaded["lazy"]
    assert te.convert_hf is te.integrations.huggingface.convert_hf


# Importing Megatron takes four seconds.
MEGATRON = "transformer_engine.pytorch.integrations.megatron"


@pytest.mark.parametrize("of_megatron", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_module_can_be_imported_first(of_megatron: bool):
    program = Path(__file__).with_name("import_first.py")
    # The modules that implement the command are not public, and most of them import a framework each.
    public = [name for name in modules() if not name.startswith("transformer_engine_tools.")]
    names = [name for name in public if name.startswith(MEGATRON) == of_megatron]
    if importlib.util.find_spec("flax") is None:  # no release supports Python 3.10
        names = [
            name
            for name in names
            if not name.startswith(("transformer_engine.jax", "transformer_engine_jax"))
        ]
    assert names
    listing = subprocess.run(
        [sys.executable, str(program), *names], capture_output=True, text=True, check=True
    ).stdout
    failures = json.loads(listing)
    assert not failures, "\n".join(f"{name}:\n{text}" for name, text in failures.items())


def test_the_tracing_mark_equals_torchs_mark():
    def ours():
        return 1

    def theirs():
        return 1

    constant_while_tracing(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)


# Registers the operators, removes the package's modules and imports them again.
IMPORTED_AGAIN = """
import sys, torch
import transformer_engine.pytorch as before
import transformer_engine.pytorch.primitives.attention.operators
import transformer_engine.pytorch.primitives.quantize.exported

old = before.Linear(32, 32, device="cpu")
x = torch.arange(512.0).view(16, 32)
for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
    del sys.modules[name]

import transformer_engine.pytorch as te
import transformer_engine.pytorch.primitives.attention.operators
from transformer_engine.pytorch.primitives.quantize import exported
from transformer_engine.common.recipe import DelayedScaling

assert te is not before
new = te.Linear(32, 32, device="cpu")
new.load_state_dict(old.state_dict())
assert torch.equal(new(x), old(x))
with te.autocast(recipe=DelayedScaling()):
    new(x).sum().backward()
codes = torch.ops.tex.fp8_quantize(x, torch.tensor([0.25]), torch.float8_e4m3fn)
assert torch.equal(codes.float(), (x / 4).to(torch.float8_e4m3fn).float())
assert exported.fp8_quantize is torch.ops.tex.fp8_quantize.default
"""


def test_package_is_imported_again_after_its_modules_are_removed():
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED_AGAIN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
