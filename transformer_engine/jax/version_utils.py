"""Is the installed jax new enough?"""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from ..common import absent

__all__ = ["jax_version_meet_requirement"]

__getattr__ = absent.getter(__name__)


def jax_version_meet_requirement(least: str) -> bool:
    """Is jax of that version or newer?"""
    return Version(version("jax")) >= Version(least)
