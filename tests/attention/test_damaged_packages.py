"""An optional library that fails to import is an unsupported backend with the import error, and is imported once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.programs import search_path

# module -> (distribution, version, the file that raises)
PACKAGES = {
    "flash_attn": ("flash-attn", "2.8.3", "flash_attn/__init__.py"),
    "flash_attn.cute.interface": ("flash-attn-4", "4.0.0b36", "flash_attn/cute/interface.py"),
    "flash_attn_interface": ("flash-attn-3", "3.0.0", "flash_attn_interface.py"),
    "cudnn": ("nvidia-cudnn-frontend", "1.23.0", "cudnn/__init__.py"),
    "nvmath": ("nvmath-python", "0.8.0", "nvmath/__init__.py"),
    "triton": ("triton", "3.6.0", "triton/__init__.py"),
}
# The damages in one process; a package's error and its submodule's error look alike, so never both.
DAMAGES = [
    {module: "ModuleNotFoundError" for module in PACKAGES if module != "flash_attn.cute.interface"},
    {
        "flash_attn": "no function",
        "flash_attn.cute.interface": "ModuleNotFoundError",
        "triton": "OSError",
        "cudnn": "OSError",
    },
    {"flash_attn": "AttributeError"},
]
MESSAGES = {
    "no function": "flash_attn has no flash_attn_func; install a version that has",
    "ModuleNotFoundError": "No module named 'its_part'",
    "OSError": "libpart.so: cannot open shared object file",
    "AttributeError": "module 'torch' has no attribute 'its_part'",
}

# Prints every rejection reason on a GPU with capability 9.0, without using a GPU.
ASKED = """
from dataclasses import replace
import torch
from transformer_engine.common.hardware import nvidia
import transformer_engine.pytorch as te
from transformer_engine.common.dispatch import tables
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn, cudnn_graph, flash2, flash3, flash4, triton)
from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams
from transformer_engine.pytorch.runtime import launching
from transformer_engine.pytorch.primitives.gemm import cublaslt_library

cudnn_graph.get_cudnn_version = lambda: (9, 19, 0)
request = replace(AttentionParams(qkv_dtype=torch.bfloat16, qkv_layout="bshd_bshd_bshd").request(),
    device_type="cuda", hardware=nvidia(9, 0), needs_gradient=True)
ask = {
    "flash_attn": lambda: flash2.unsupported_reason(request),
    "flash_attn.cute.interface": lambda: flash4.unsupported_reason(request),
    "flash_attn_interface": lambda: flash3.unsupported_reason(request),
    "cudnn": lambda: cudnn.unsupported_reason(request),
    "nvmath": cublaslt_library.unavailable_reason,
    "triton": lambda: triton.unsupported_reason(request),
}
for name in COUNTERS:
    print("REASON", name, ask[name]())
    assert ask[name]() == ask[name]()
if "triton" in COUNTERS:
    assert launching.unsupported_elementwise(torch.device("cuda"), torch.float32) == ask["triton"]()

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = te.MultiheadAttention(32, 4, attention_dropout=0.0, device=device)
x = torch.randn(16, 2, 32, device=device, requires_grad=True)
layer(x).sum().backward()
assert x.grad.isfinite().all()
te.DotProductAttention(4, 8)(*torch.randn(3, 16, 2, 4, 8, device=device))
for name, counter in COUNTERS.items():
    print("IMPORTED", name, open(counter).read().count("x"))
"""


def install(folder: Path, module: str, statement: str) -> Path:
    """Install a package whose import counts itself and raises; return the file that holds the count."""
    distribution, version, path = PACKAGES[module]
    counter = folder / f"{module}.counter"
    counter.write_text("")
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    for parent in file.parents:
        if parent != folder and folder in parent.parents:
            (parent / "__init__.py").touch()
    file.write_text(f'open({str(counter)!r}, "a").write("x")\n{statement}\n')
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return counter


def run(folder: Path, program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": search_path(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damages", DAMAGES, ids=str)
def test_a_damaged_package_is_a_rejection_and_every_call_works(damages, tmp_path):
    counters = {}
    for module, error in damages.items():
        statement = "pass" if error == "no function" else f"raise {error}({MESSAGES[error]!r})"
        counters[module] = str(install(tmp_path, module, statement))
    lines = run(tmp_path, f"COUNTERS = {counters!r}\n" + ASKED).splitlines()
    for module, error in damages.items():
        (reason,) = [line for line in lines if line.startswith(f"REASON {module} ")]
        assert MESSAGES[error] in reason, reason
        # A module that raised is not in sys.modules: torch may import Triton again, but the package does not.
        if module != "triton":
            assert f"IMPORTED {module} 1" in lines
