"""Libraries that need not be there: is one installed, and if its import fails, with which words.

A library that cannot be used is a reason for its backend to refuse, never an error of a call. `installed` finds it
without importing it; `failure` imports it, once a process, and is asked when nothing else speaks against the backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

# What the import of a damaged package raises: a part or a shared library that is missing, a name that moved.
FAILURES = (ImportError, OSError, AttributeError, RuntimeError)


def installed(module: str) -> bool:
    """Is there a top-level module of that name, whether or not it can be imported?"""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def failure(module: str, *names: str) -> str | None:
    """Why a module, or one of these names in it, cannot be imported; None: it is imported."""
    return _failure(module, names)


# A tracing compiler takes the answer as a constant, as torch.compiler.assume_constant_result has it.
failure._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _failure(module: str, names: tuple[str, ...]) -> str | None:
    try:
        imported = importlib.import_module(module)
    except FAILURES as error:
        return described(module, error)
    for name in names:
        if not hasattr(imported, name):
            return f"{module} has no {name}; install a version that has, or uninstall it"
    return None


def described(module: str, error: BaseException) -> str:
    """The refusal that the failed import of a module is."""
    said = " ".join(str(error).split())
    return f"importing {module} failed: {type(error).__name__}: {said}; repair the package or uninstall it"
