"""The package's source files, parsed once for all architecture tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("transformer_engine", "transformer_engine_torch")


@functools.cache
def modules() -> dict[str, Path]:
    """{dotted name: file} of every module of the product."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def imports(name: str) -> list[tuple[str, int]]:
    """(imported module of ours, line) for every import statement in a module, TYPE_CHECKING blocks left out."""
    found: list[tuple[str, int]] = []
    for node in _runtime_nodes(tree(modules()[name])):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((full if full in modules() else base, node.lineno))
    return [(target, line) for target, line in found if target.split(".")[0] in PACKAGES]


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    if not is_package(name):
        parts = parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join(parts + ([node.module] if node.module else []))


def _runtime_nodes(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _runtime_nodes(child)
