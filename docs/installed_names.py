"""Print installed packages' public names and their callables' parameters, as JSON.

python docs/installed_names.py DIRECTORY PACKAGE.. < NAMES

`names_table.py` runs this program in another process, because two packages with one name cannot be imported
together. It imports all public package modules in DIRECTORY, and prints no source. NAMES is a JSON list with
the names to look up.

The last output line is {"found": {name: [kind, parameters]}, "removed": [name ..]}. Class functions have
the kind "method", and are listed with the first name for their class. A parameter is [name, kind, default]. The
default is the text for a number, a string, a bool or None, also as an enumeration member's value; "..." for other
objects; null for no default. "removed" lists the names in NAMES that their packages lack. Modules that cannot be
imported are reported on the error stream, and their names are not in "removed".
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import math
import pkgutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

Parameter = list[str | None]
OTHER = "..."


def parameters(value: Any) -> list[Parameter] | None:
    """A callable's parameters [name, kind, default]; None if it has no signature."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    return [[p.name, p.kind.name, _default(p)] for p in signature.parameters.values()]


def _default(parameter: inspect.Parameter) -> str | None:
    default = parameter.default
    if default is parameter.empty:
        return None
    if isinstance(default, enum.Enum):
        default = default.value
    if default is not None and type(default) not in (bool, int, float, str):
        return OTHER
    return OTHER if isinstance(default, float) and not math.isfinite(default) else repr(default)


def kind(value: Any) -> str:
    """Kind of a public object: module, class, function or value."""
    if inspect.ismodule(value):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) else "value"


class Walk:
    """Public package names.

    Attributes:
        found: {name: [kind, parameters]}.
    """

    def __init__(self, packages: list[str]) -> None:
        self.found: dict[str, list[Any]] = {}
        self._packages = tuple(packages)
        self._classes: set[type] = set()

    def visit(self, name: str) -> None:
        """Import a module, and list what it defines, or imports from the packages."""
        try:
            module = importlib.import_module(name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            return
        self.found[name] = ["module", None]
        for attribute, value in list(vars(module).items()):
            home = str(getattr(value, "__module__", name))
            hidden = attribute.startswith("_") or attribute == "TYPE_CHECKING"
            if hidden or inspect.ismodule(value) or not self._is_own(home):
                continue
            self.found[f"{name}.{attribute}"] = [
                kind(value),
                parameters(value) if callable(value) else None,
            ]
            if isinstance(value, type) and value not in self._classes:
                self._classes.add(value)
                self._visit_class(f"{name}.{attribute}", value)

    def _is_own(self, home: str) -> bool:
        return home.partition(".")[0] in self._packages

    def _visit_class(self, name: str, value: type) -> None:
        for attribute, member in list(vars(value).items()):
            function = getattr(member, "__func__", member)  # for static and class methods
            if not attribute.startswith("_") and inspect.isroutine(function):
                self.found[f"{name}.{attribute}"] = [
                    "method",
                    parameters(getattr(value, attribute)),
                ]

    def removed(self, names: list[str]) -> list[str]:
        """The names that visited packages lack; not those in or below a module that cannot be imported."""
        visited = {name.partition(".")[0] for name in self.found}
        return [name for name in names if name.partition(".")[0] in visited and _is_removed(name)]


def _is_removed(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        try:
            value: Any = importlib.import_module(path)
            for part in parts[end:]:
                value = getattr(value, part)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                return False  # another library is missing
            continue  # a module or class attribute
        except AttributeError:
            return True
        except Exception:
            return False
        return False
    return True


class Finder:
    """The first finder, which takes packages from one directory only.

    An editable installation's finder offers this package's modules where the other one lacks them.
    """

    def __init__(self, directory: str, packages: list[str]) -> None:
        self._directory = directory
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a package module; raise ModuleNotFoundError if the directory lacks it."""
        if name.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(name, [self._directory] if path is None else path, target)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r} in {self._directory}", name=name)
        return spec


def main() -> None:
    """Print the names."""
    directory, *packages = sys.argv[1:]
    sys.meta_path.insert(0, Finder(directory, packages))  # pyright: ignore[reportArgumentType]
    walk = Walk(packages)
    for package in packages:
        walk.visit(package)
        path = getattr(sys.modules.get(package), "__path__", ())
        for info in pkgutil.walk_packages(path, f"{package}.", onerror=lambda _: None):
            if not any(part.startswith("_") for part in info.name.split(".")):
                walk.visit(info.name)
    names = json.load(sys.stdin)
    print(json.dumps({"found": walk.found, "removed": walk.removed(names)}))


if __name__ == "__main__":
    main()
