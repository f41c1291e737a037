"""The package's source files, parsed once for all architecture tests."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "transformer_engine",
    "transformer_engine_jax",
    "transformer_engine_tools",
    "transformer_engine_torch",
)


@functools.cache
def modules() -> dict[str, Path]:
    """{dotted name: file} for every module in the product."""
    results = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return results


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node in a file's tree: walking costs more than parsing, and most rules walk."""
    return tuple(ast.walk(tree(path)))


def is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def imports(name: str) -> list[tuple[str, int]]:
    """(imported module of ours, line) for every import statement in a module.

    Imports under TYPE_CHECKING, inside functions and by `import_module` with a constant name count, because a
    reader follows them too.
    """
    results: list[tuple[str, int]] = []
    for node in nodes(modules()[name]):
        if isinstance(node, ast.Import):
            results += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                results.append((full if full in modules() else base, node.lineno))
        elif isinstance(node, ast.Call) and _callee_name(node) == "import_module":
            target = _constant_target(name, node)
            results += [] if target is None else [(target, node.lineno)]
    return [(target, line) for target, line in results if target.split(".")[0] in PACKAGES]


def find_computed_imports(name: str) -> list[int]:
    """Lines on which a module calls `import_module` with a name that is not a constant."""
    return [
        node.lineno
        for node in nodes(modules()[name])
        if isinstance(node, ast.Call)
        and _callee_name(node) in ("import_module", "__import__")
        and _constant_target(name, node) is None
    ]


def _callee_name(node: ast.Call) -> str:
    """Last part of the name that a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _constant_target(name: str, node: ast.Call) -> str | None:
    """Absolute module name in an `import_module` call with a constant; otherwise None."""
    argument = node.args[0] if node.args else None
    if not isinstance(argument, ast.Constant):
        return None
    target = str(argument.value)
    above = len(target) - len(target.lstrip("."))
    if not above:
        return target
    # Relative to __name__ or to __package__, depending on the second argument.
    of_package = is_package(name) or "__package__" in ast.dump(node.args[1])
    parts = name.split(".")[: None if is_package(name) or not of_package else -1]
    return ".".join([*parts[: len(parts) - (above - 1)], target.lstrip(".")])


def find_loaded_modules(name: str) -> set[str]:
    """Our modules that Python begins to load while it loads a module, before its own body ends.

    Importing `a.b.c` loads the packages `a` and `a.b` first. A module's own packages are already loading. Imports in
    functions and under TYPE_CHECKING load nothing.
    """
    results: set[str] = set()
    for node in _run_on_load(tree(modules()[name]).body):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            full = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in modules() else base for target in full]
        for target in targets:
            parts = target.split(".")
            results |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return {
        target for target in results & set(modules()) if not f"{name}.".startswith(f"{target}.")
    }


def _run_on_load(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement that runs when a module is imported, including statements in blocks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _run_on_load(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            yield from _run_on_load(getattr(node, field, ()))


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    if not is_package(name):
        parts = parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join(parts + ([node.module] if node.module else []))


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Maximal node sets, of two or more, in which every node leads to every other (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    results: list[frozenset[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            members = frozenset(path[path.index(node) :])
            del path[path.index(node) :]
            if len(members) > 1:
                results.append(members)

    for node in graph:
        if node not in order:
            visit(node)
    return results
