"""client_surface.json: {client: version, names}, every dotted engine name in installed clients' source.

`python tests/clients/walk_surface.py SITE_PACKAGES` reads the clients there, without importing them, and rewrites the
file. A client that is not installed keeps its entry. Names come from imports and from attributes of imported modules:
`import transformer_engine as te` and `te.pytorch.Linear` give transformer_engine.pytorch.Linear. Attributes of objects
(a module's weight, a tensor's codes) are not recorded.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).parent / "client_surface.json"
ENGINE = ("transformer_engine", "transformer_engine_torch")
# The folder that each distribution installs.
CLIENTS = {
    "accelerate": "accelerate",
    "ai2-olmo-core": "olmo_core",
    "bionemo-llm": "bionemo",
    "cosmos-predict2": "imaginaire",
    "cosmos-rl": "cosmos_rl",
    "esm": "esm",
    "evo2": "evo2",
    "lightning": "lightning",
    "lightning-thunder": "thunder",
    "llm-foundry": "llmfoundry",
    "mcore-bridge": "mcore_bridge",
    "megatron-bridge": "megatron/bridge",
    "megatron-core": "megatron/core",
    "megatron-fsdp": "megatron_fsdp",
    "mosaicml": "composer",
    "ms-swift": "swift",
    "nemo-automodel": "nemo_automodel",
    "nemo-toolkit": "nemo",
    "nvidia-modelopt": "modelopt",
    "nvidia-physicsnemo": "physicsnemo",
    "nvidia-resiliency-ext": "nvidia_resiliency_ext",
    "peft": "peft",
    "verl": "verl",
    "vtx": "vortex",
}


# Functions that import what their argument names.
LAZY = ("OptionalImport", "import_module")


class Names(ast.NodeVisitor):
    """Engine names in one file: imports and their attribute chains."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.bound: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in ENGINE:
                self.found.add(alias.name)
                if alias.asname is None:
                    self.bound[alias.name.split(".")[0]] = alias.name.split(".")[0]
                else:
                    self.bound[alias.asname] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None or node.module.split(".")[0] not in ENGINE:
            return
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self.found.add(name if alias.name != "*" else node.module)
            self.bound[alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        """te = OptionalImport("transformer_engine.pytorch")"""
        call, target = node.value, node.targets[0]
        if isinstance(call, ast.Call) and isinstance(target, ast.Name) and call.args:
            function, argument = ast.unparse(call.func).split(".")[-1], call.args[0]
            if (
                function in LAZY
                and isinstance(argument, ast.Constant)
                and str(argument.value).split(".")[0] in ENGINE
            ):
                self.found.add(argument.value)
                self.bound[target.id] = argument.value
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.found.add(name)

    def dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None


def public_names(source: str) -> set[str]:
    tree = ast.parse(source)
    names = Names()
    # imports first: a function may stand before the block that imports for it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
            names.visit(node)
    names.visit(tree)
    return names.found


def sources(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "transformer_engine" in text:
            yield text


def distribution_version(distribution: str, packages: Path) -> str:
    stem = re.sub(r"[-_.]+", "_", distribution)
    (metadata,) = packages.glob(f"{stem}-*.dist-info")
    return metadata.name.removesuffix(".dist-info").removeprefix(f"{stem}-")


def walk(packages: Path, is_known: dict[str, Any]) -> dict[str, Any]:
    surface = dict(is_known)
    for distribution, folder in CLIENTS.items():
        if (packages / folder).is_dir():
            result = set[str]().union(
                *(public_names(source) for source in sources(packages / folder))
            )
            surface[distribution] = {
                "version": distribution_version(distribution, packages),
                "names": sorted(result),
            }
    return dict(sorted(surface.items()))


if __name__ == "__main__":
    known = json.loads(SURFACE.read_text()) if SURFACE.exists() else {}
    SURFACE.write_text(json.dumps(walk(Path(sys.argv[1]), known), indent=1) + "\n")
