"""Programs from README.md, the quickstart and `examples/`, and imports of every public name."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from tests.support import pages

ROOT = Path(__file__).resolve().parents[2]
# sys.modules entries without a file, which no checker sees: three former names for other modules, and a module that the
# package hides behind a function with the same name, as the original does.
RENAMED = (
    *(
        f"transformer_engine.pytorch.custom_recipes.{name}"
        for name in ("quantization.", "quantization_current_scaling.", "quantization_nvfp4.")
    ),
    "transformer_engine.pytorch.torch_version.torch_version.",
)


def page_programs() -> dict[str, str]:
    """README.md programs, one each, and the quickstart programs, which continue each other."""
    readme = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    programs = {f"readme_{number}": text for number, text in enumerate(readme)}
    blocks = pages.examples("quickstart.md")
    in_jax = [number for number, text in enumerate(blocks) if "import jax" in text]
    programs |= {f"quickstart_jax_{number}": blocks[number] for number in in_jax}
    programs["quickstart"] = "\n".join(
        text for number, text in enumerate(blocks) if number not in in_jax
    )
    return programs


def examples() -> dict[str, str]:
    return {
        f"example_{path.stem}": path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "examples").glob("*.py"))
    }


RESULTS = """\
import torch
from torch import Tensor
from typing_extensions import assert_type

import transformer_engine.pytorch as te

x = torch.ones(32, 64)
assert_type(te.Linear(64, 64)(x), Tensor)
assert_type(te.LayerNormLinear(64, 64)(x), Tensor)
assert_type(te.LayerNormMLP(64, 128)(x), Tensor)
assert_type(te.GroupedLinear(2, 64, 64)(x, [16, 16]), Tensor)
assert_type(te.RMSNorm(64)(x), Tensor)
assert_type(te.DotProductAttention(4, 16)(x, x, x), Tensor)
assert_type(te.MultiheadAttention(64, 4)(x), Tensor)
assert_type(te.TransformerLayer(64, 128, 4)(x), Tensor)
assert_type(te.RotaryPositionEmbedding(64)(32), Tensor)
assert_type(te.ops.Linear(64, 64)(x), Tensor)
assert_type(te.ops.Sequential(te.ops.GELU(), te.ops.RMSNorm(64))(x), Tensor)
y, bias = te.Linear(64, 64, return_bias=True)(x)
assert_type(te.Fp8Padding(2)(x, [16, 16])[0], Tensor)
"""


def names() -> str:
    """A program that imports every installed public name and reads every listed class attribute."""
    with (ROOT / "docs" / "names.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row["name"] for row in csv.DictReader(file) if row["status"] in ("served", "raises")
        ]
    lines = ["read: list[object] = []"]
    for number, name in enumerate(name for name in rows if not f"{name}.".startswith(RENAMED)):
        module, attributes = _split(name)
        if not attributes:
            lines.append(f"import {module}")
            continue
        lines.append(f"from {module} import {attributes[0]} as name_{number}")
        lines.append(f"read.append({'.'.join([f'name_{number}', *attributes[1:]])})")
    return "\n".join(lines) + "\n"


def _split(name: str) -> tuple[str, list[str]]:
    """Split a dotted name into the longest prefix with a file or folder in this package, and the attributes behind."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:length]), parts[length:]
    raise AssertionError(f"{name} is not below a package of this repository")
