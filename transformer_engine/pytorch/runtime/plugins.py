"""Environment plugins: importing this module loads NVTE_PLUGIN's module, and warns about removed variables.

A plugin may put its own module into `sys.modules["transformer_engine_torch"]`. This package's
extension is then importable as `transformer_engine_torch_nv`, which is loaded when any of its names
is first read: the extension is built on `transformer_engine.pytorch`, which imports plugins first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ...common import env

REMOVED = {
    "NVTE_FUSED_ATTN_BACKEND": "the kind of fused attention follows from the call; it is still read here",
}
EXTENSION = "transformer_engine_torch"
ALIAS = f"{EXTENSION}_nv"
_ROOT = str(Path(__file__).parents[3])
# Names in a plugin's extension that replace attention in NVIDIA's engine.
_REPLACEMENTS = ("flash_attention", "get_attention_backend")


class _Alias(ModuleType):
    """This package's extension under its second name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(own_extension(), name)

    def __dir__(self) -> list[str]:
        return dir(own_extension())


def own_extension() -> ModuleType:
    """This package's transformer_engine_torch, even if another module has its name in `sys.modules`."""
    current = sys.modules.get(EXTENSION)
    if _is_own(current):
        return current  # pyright: ignore[reportReturnType]
    loaded = _loaded.get(EXTENSION)
    if loaded is not None:
        return loaded
    spec = PathFinder.find_spec(EXTENSION, [_ROOT])
    if spec is None or spec.loader is None:
        raise ImportError(f"{EXTENSION} is not in {_ROOT}; reinstall the package", name=EXTENSION)
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXTENSION] = module  # its files import each other by this name
    try:
        spec.loader.exec_module(module)
        _loaded[EXTENSION] = module
    finally:
        if current is None:
            if module is not _loaded.get(EXTENSION):
                del sys.modules[EXTENSION]
        else:
            sys.modules[EXTENSION] = current
    return module


_loaded: dict[str, ModuleType] = {}


def _is_own(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent == Path(_ROOT) / EXTENSION


def load_plugin() -> None:
    """Import the module that NVTE_PLUGIN names and call its `load_plugins()`; a failure is a RuntimeWarning."""
    name = env.get("NVTE_PLUGIN")
    if not name:
        return
    sys.modules.setdefault(
        ALIAS, _Alias(ALIAS, "The extension of this package, also if a plugin replaces it.")
    )
    try:
        importlib.import_module(str(name)).load_plugins()
    except Exception as error:  # the plugin's errors are unknown, and must not end the import
        warnings.warn(
            f"NVTE_PLUGIN={name!r} was not loaded: {type(error).__name__}: {error}; unset it, or fix the module",
            RuntimeWarning,
            stacklevel=3,
        )
    extension = sys.modules.get(EXTENSION)
    unused = (
        [] if _is_own(extension) else [name for name in _REPLACEMENTS if hasattr(extension, name)]
    )
    if unused:
        warnings.warn(
            f"the plugin's {EXTENSION} has {' and '.join(unused)}, which DotProductAttention does not call; pass a "
            "score_mod, or call the functions of the plugin",
            RuntimeWarning,
            stacklevel=3,
        )


def warn_removed() -> None:
    """Warn about variables that NVIDIA's engine no longer has since release 2.20."""
    for name, reason in REMOVED.items():
        if name in os.environ:
            warnings.warn(
                f"{name} is removed from release 2.20 of the API: {reason}; unset it",
                FutureWarning,
                stacklevel=3,
            )


load_plugin()
warn_removed()
