"""Optional libraries: whether they are installed, why an import fails, and how to install an extra.

A library that cannot be imported makes its backend unsupported; it never fails a call. `installed` looks for a library
without importing it; `failure` imports it, once per process, after all other conditions of the backend hold.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib import metadata

from packaging.version import Version

from .hardware import Hardware
from .tracing import constant_while_tracing

# Raised by importing a damaged package: a submodule or shared library is missing, or a name has moved.
FAILURES = (ImportError, OSError, AttributeError, RuntimeError)
# Of Triton. With 3.9 all kernels compile, but two grouped products spill registers, and none has run on a GPU.
GLUON_RELEASES = ((3, 6), (3, 7), (3, 8))


@constant_while_tracing
def installed(module: str) -> bool:
    """Whether a top-level module with that name exists, importable or not."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


@constant_while_tracing
def failure(module: str, *names: str) -> str | None:
    """Reason why a module, or one of these names in it, cannot be imported; None after a successful import."""
    return _failure(module, names)


@functools.cache
def _failure(module: str, names: tuple[str, ...]) -> str | None:
    try:
        imported = importlib.import_module(module)
    except FAILURES as error:
        return import_failure(module, error)
    for name in names:
        if not hasattr(imported, name):
            return f"{module} has no {name}; install a version that has, or uninstall it"
    return None


def import_failure(module: str, error: BaseException) -> str:
    """Error message for a module's failed import."""
    said = " ".join(str(error).split())
    return f"importing {module} failed: {type(error).__name__}: {said}; repair the package or uninstall it"


MINIMUM_CUDNN = (9, 13, 1)
_MINIMUM_FRONTEND = (1, 23)  # earlier ones cannot run a graph on an address list
# They emit an attribute that cuDNN before 9.20 does not support.
_FRONTENDS_FOR_920 = ((1, 24), (1, 25), (1, 26))


def cudnn_versions_problem(frontend: str, cudnn: tuple[int, ...]) -> str | None:
    """Reason why a version of nvidia-cudnn-frontend cannot be used with a cuDNN version, or None."""
    major, minor = (*Version(frontend).release, 0)[:2]
    if (major, minor) < _MINIMUM_FRONTEND:
        return (
            f"nvidia-cudnn-frontend {frontend} < 1.23; pip install 'nvidia-cudnn-frontend>=1.23,<2'"
        )
    installed = ".".join(map(str, cudnn))
    if cudnn < MINIMUM_CUDNN:
        return f"cuDNN {installed} < {'.'.join(map(str, MINIMUM_CUDNN))}"
    if (major, minor) in _FRONTENDS_FOR_920 and cudnn < (9, 20, 0):
        return (
            f"nvidia-cudnn-frontend {frontend} needs cuDNN 9.20, found {installed}; "
            "pip install 'nvidia-cudnn-frontend>=1.27,<2'"
        )
    return None


def triton_problem(hardware: Hardware, release: tuple[int, int]) -> str | None:
    """Reason why a Triton release does not compile for a GPU, or None; see `release` for (0, 0)."""
    if not _is_older(release, hardware.triton):
        return None
    installed = ".".join(map(str, release))
    return f"Triton {installed} does not compile for {hardware.title}; {_upgrade_of_triton(hardware.triton)}"


def scaled_dot_problem(hardware: Hardware, release: tuple[int, int]) -> str | None:
    """Reason why tl.dot_scaled in a Triton release is not a GPU's native product, or None; as above."""
    if not _is_older(release, hardware.scaled_dot):
        return None
    condition = f"{hardware.title} before Triton {'.'.join(map(str, hardware.scaled_dot))}"
    return f"tl.dot_scaled multiplies in bfloat16 on {condition}; {_upgrade_of_triton(hardware.scaled_dot)}"


def gluon_problem(release: tuple[int, int]) -> str | None:
    """Return why kernels in Gluon, whose names change between releases of Triton, do not compile, or None."""
    if release in GLUON_RELEASES:
        return None
    known = ", ".join(".".join(map(str, each)) for each in GLUON_RELEASES)
    return f"the Gluon of Triton {'.'.join(map(str, release))} is unknown; install one of Triton {known}"


def _is_older(release: tuple[int, int], first: tuple[int, int]) -> bool:
    """Whether a release is older than the first that meets a requirement.

    A development build without metadata, (0, 0), counts as new enough.
    """
    return (0, 0) < release < first  # torch 2.11 does not trace `!=` between tuples


def _upgrade_of_triton(release: tuple[int, int]) -> str:
    """Command that installs a Triton release or a later one."""
    return f"pip install --upgrade 'triton>={'.'.join(map(str, release))}'"


@constant_while_tracing
def release(distribution: str) -> tuple[int, int]:
    """Version (major, minor) of an installed distribution; (0, 0) without metadata, as in a development build."""
    return _release(distribution)


@functools.cache
def _release(distribution: str) -> tuple[int, int]:
    try:
        major, minor = (*Version(metadata.version(distribution)).release, 0)[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return major, minor


@constant_while_tracing
def release_problem(distribution: str, first: tuple[int, int], end: tuple[int, int]) -> str | None:
    """Reason why the installed release of a distribution is unsupported, or None; (0, 0), see `release`, is supported.

    Args:
        distribution: Name of the distribution.
        first: First supported release.
        end: First release after it that is not supported.
    """
    installed = release(distribution)
    if installed == (0, 0) or first <= installed < end:
        return None
    text, first_text, end_text = (
        ".".join(map(str, version)) for version in (installed, first, end)
    )
    limit = f"< {first_text}" if installed < first else f">= {end_text}, which is not tested"
    return f"{distribution} {text} {limit}; pip install '{distribution}>={first_text},<{end_text}'"


def install_command(extra: str) -> str:
    """Command that installs an extra from pyproject.toml.

    It installs from a checkout: package indexes hold NVIDIA's engine under this package's name.
    """
    return f'pip install ".[{extra}]" in a checkout of this package'
