"""Importing the package is cheap and does not depend on the order of imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import transformer_engine.pytorch as te
from tests.architecture.source import modules
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
    "typer",
)
# Other modules of torch and the standard library that the package loads beyond `import torch`: 7 with torch 2.13.
OTHERS = 20


def loaded_beyond_torch(program: str) -> set[str]:
    """Return the modules that a program loads in a fresh interpreter in addition to those of `import torch`."""
    whole = f"import sys, torch; before = set(sys.modules); {program}; print(*(set(sys.modules) - before))"
    return set(
        subprocess.run(
            [sys.executable, "-c", whole], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_import_loads_nothing_heavy_beyond_torch():
    found = loaded_beyond_torch(
        "import transformer_engine, transformer_engine.pytorch, transformer_engine_torch"
    )
    assert "transformer_engine_torch" in found
    assert not sorted(name for name in found if is_within(name, HEAVY))
    others = sorted(name for name in found if not name.startswith("transformer_engine"))
    assert len(others) <= OTHERS, others


def test_pytorch_package_does_not_load_its_adapters_or_checkpoint_conversion():
    found = loaded_beyond_torch("import transformer_engine.pytorch")
    lazy = ("conversion", "cpp_extensions", "integrations")
    packages = ("transformer_engine_torch", *(f"transformer_engine.pytorch.{name}" for name in lazy))
    assert not sorted(name for name in found if is_within(name, packages))


def test_lazy_names_are_public_attributes():
    lazy = ["conversion", "convert_hf", "cpp_extensions", "integrations", "ops", "revert_hf"]
    assert set(lazy) <= set(dir(te)) and set(lazy) <= set(te.__all__)
    program = f"from transformer_engine.pytorch import *; print({', '.join(lazy)})"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert te.convert_hf is te.integrations.huggingface.convert_hf


def test_every_module_can_be_imported_first():
    program = Path(__file__).with_name("import_first.py")
    # The modules of the command's implementation are not public, and most of them import a framework each.
    names = [name for name in modules() if not name.startswith("transformer_engine.cli.")]
    shown = subprocess.run(
        [sys.executable, str(program), *names], capture_output=True, text=True, check=True
    ).stdout
    failures = json.loads(shown)
    assert not failures, "\n".join(f"{name}:\n{text}" for name, text in failures.items())


def test_the_tracing_mark_is_the_one_torch_sets():
    def ours():
        return 1

    def theirs():
        return 1

    constant_while_tracing(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)
