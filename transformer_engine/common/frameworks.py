"""Checks that a framework is installed in a supported version; the ImportError names the package to install."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from . import optional


@dataclass(frozen=True)
class Package:
    """A distribution that is supported in the versions [least, below); None: no limit.

    Attributes:
        name: Name of the distribution.
        least: First supported version.
        below: First unsupported version after it, or None.
    """

    name: str
    least: str
    below: str | None = None

    def unsupported_reason(self, installed: str) -> str | None:
        """Reason why this version is unsupported, or None."""
        release = Version(installed)
        if release >= Version(self.least) and (self.below is None or release < Version(self.below)):
            return None
        limit = "" if self.below is None else f",<{self.below}"
        return f"{self.name} {installed} is installed, {self.name}>={self.least}{limit} is needed"


@dataclass(frozen=True)
class Framework:
    """Requirements for `transformer_engine.<module>`, and the extra that installs them.

    Attributes:
        module: "pytorch" or "jax".
        extra: Extra that installs the requirements.
        python: Lowest supported Python version.
        packages: Required distributions.
    """

    module: str
    extra: str
    python: tuple[int, int]
    packages: tuple[Package, ...]


PYTORCH = Framework("pytorch", "pytorch", (3, 10), (Package("torch", "2.11"),))
JAX = Framework(
    "jax", "jax", (3, 11), (Package("jax", "0.10.2", "0.13"), Package("flax", "0.12.8", "0.13"))
)


def demand(framework: Framework) -> None:
    """Raise ImportError unless Python and every framework package have a supported version."""
    name = f"transformer_engine.{framework.module}"
    remedy = optional.install_command(framework.extra)
    if sys.version_info[:2] < framework.python:
        least, current = (".".join(map(str, v)) for v in (framework.python, sys.version_info[:2]))
        raise ImportError(
            f"{name} needs Python {least} or newer, this is Python {current}; make an environment with a newer "
            f"Python and {remedy}"
        )
    for package in framework.packages:
        if not optional.installed(package.name):
            raise ModuleNotFoundError(
                f"{name} needs {package.name}, which is not installed; {remedy}", name=package.name
            )
        try:
            reason = package.unsupported_reason(version(package.name))
        except PackageNotFoundError:
            continue  # a package on the path without metadata: a development build
        if reason is not None:
            raise ImportError(f"{name}: {reason}; {remedy}")
