"""modules_of(package): the files of a folder, imported, where the folder itself is the list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def modules_of(package: str, path: Iterable[str], suffix: str = "") -> list[ModuleType]:
    """The modules of a package whose names end in suffix, by name; call it with the package's __name__ and __path__."""
    names = sorted(found.name for found in pkgutil.iter_modules(path) if found.name.endswith(suffix))
    return [importlib.import_module(f"{package}.{name}") for name in names]


def exports_of(modules: Iterable[ModuleType]) -> dict[str, Any]:
    """{name: object} of everything that the modules list in __all__."""
    return {name: getattr(module, name) for module in modules for name in module.__all__}
