"""Text files are read and written as UTF-8, whatever the locale."""

from __future__ import annotations

import ast

from tests.architecture.source import ROOT

PACKAGES = (
    "transformer_engine",
    "transformer_engine_jax",
    "transformer_engine_tools",
    "transformer_engine_torch",
)


def _opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    if name not in ("open", "NamedTemporaryFile", "fdopen"):
        return False
    strings = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return any(mode in ("r", "w", "a", "x", "r+", "w+") for mode in strings)


def test_text_files_are_opened_with_an_encoding():
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _opens_text(node)
        if "encoding" not in [keyword.arg for keyword in node.keywords]
    ]
    assert not without
