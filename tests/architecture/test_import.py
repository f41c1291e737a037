"""Importing the package is cheap: it pulls in no compiler, no Triton, no plotting and no CLI."""

from __future__ import annotations

import subprocess
import sys

import torch

from transformer_engine.pytorch.runtime.tracing import constant_while_tracing

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "matplotlib",
    "typer",
    "rich",
    "nvmath",
    "cudnn",
    "flash_attn",
)


def test_import_brings_in_nothing_heavy_beyond_torch():
    program = (
        "import sys, torch; before = set(sys.modules); "
        "import transformer_engine, transformer_engine.pytorch, transformer_engine_torch; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "transformer_engine_torch" in shown.split()
    assert not [name for name in HEAVY if name in shown.split()]


def test_the_tracing_mark_is_the_one_torch_sets():
    def ours():
        return 1

    def theirs():
        return 1

    constant_while_tracing(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)
