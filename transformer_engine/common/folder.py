"""import_modules(package): imports every module in a package, so that adding a file registers it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def import_modules(package: str, path: Iterable[str], suffix: str = "") -> list[ModuleType]:
    """Import the modules in a package (its __name__ and __path__) whose names end in suffix, in alphabetical order."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(path) if module.name.endswith(suffix)
    )
    return [importlib.import_module(f"{package}.{name}") for name in names]
