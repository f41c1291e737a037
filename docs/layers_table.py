"""Write the layer tables in docs/architecture.md from tests/architecture; --check only compares.

python docs/layers_table.py [--check]
"""

from __future__ import annotations

import runpy
import sys

from generated import ROOT, write

PAGE = ROOT / "docs" / "architecture.md"
LAYERS = runpy.run_path(str(ROOT / "tests" / "architecture" / "layers_of_modules.py"))


def module_path(name: str) -> str:
    """Path for a module or package, relative to `transformer_engine` if inside it."""
    parts = name.split(".")
    suffix = "" if ROOT.joinpath(*parts).is_dir() else ".py"
    below = parts[1:] if parts[0] == "transformer_engine" and parts[1:] else parts
    return f"`{'/'.join(below)}{suffix}`"


def table(group: str) -> str:
    """Table for a row group, the highest layer first."""
    lines = ["| layer | modules | content |", "| --- | --- | --- |"]
    for layer, names, content in LAYERS[group]:
        lines.append(f"| {layer} | {', '.join(map(module_path, names.split()))} | {content} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    tables = {
        "shared layers": table("SHARED"),
        "layers of PyTorch": table("PYTORCH"),
        "layers of JAX": table("JAX"),
    }
    sys.exit(write(__file__, {PAGE: tables}))
