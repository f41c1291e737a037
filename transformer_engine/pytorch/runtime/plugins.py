"""Plugins of the environment: importing this module loads NVTE_PLUGIN's module, and warns about removed variables."""

from __future__ import annotations

import importlib
import os
import warnings

from ...common import env

REMOVED = {
    "NVTE_FUSED_ATTN_BACKEND": "the kind of fused attention follows from the call; it is still read here",
}


def load_plugin() -> None:
    """Import the module that NVTE_PLUGIN names and call its `load_plugins()`; a failure is a RuntimeWarning."""
    name = env.get("NVTE_PLUGIN")
    if not name:
        return
    try:
        importlib.import_module(str(name)).load_plugins()
    except Exception as error:  # the plugin's errors are unknown, and must not end the import
        warnings.warn(
            f"NVTE_PLUGIN={name!r} was not loaded: {type(error).__name__}: {error}; unset it, or fix the module",
            RuntimeWarning,
            stacklevel=3,
        )


def warn_removed() -> None:
    """Warn about variables that release 2.20 of the original no longer has."""
    for name, reason in REMOVED.items():
        if name in os.environ:
            warnings.warn(
                f"{name} is removed from release 2.20 of the API: {reason}; unset it",
                FutureWarning,
                stacklevel=3,
            )


load_plugin()
warn_removed()
