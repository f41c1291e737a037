"""Comparison of the installed jax with a required version."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import InvalidVersion, Version

from ..common import absent
from ..common.checks import described

__all__ = ["jax_version_meet_requirement"]

__getattr__ = absent.getter(__name__)


def jax_version_meet_requirement(least: str) -> bool:
    """Return whether the installed jax has at least a version such as "0.5.3".

    Raises:
        ValueError: least is not a version number.
    """
    try:
        return Version(version("jax")) >= Version(least)
    except (InvalidVersion, TypeError) as error:
        raise ValueError(
            f"least={described(least)} is not a version; pass a string such as '0.5.3'"
        ) from error
