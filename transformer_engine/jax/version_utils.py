"""Comparison between the installed jax and a required version."""

from __future__ import annotations

from importlib import metadata

from packaging.version import InvalidVersion, Version

from ..common import absent
from ..common.checks import accepts_former_keywords, described

__all__ = ["is_xla_ffi_collectives_supported", "jax_version_meet_requirement"]

absent.install_getter(__name__)


@accepts_former_keywords(requirement="version", least="version")
def jax_version_meet_requirement(version: str) -> bool:
    """Whether the installed jax has at least a version such as "0.5.3".

    Raises:
        ValueError: version is not a version number.
    """
    try:
        return Version(metadata.version("jax")) >= Version(version)
    except (InvalidVersion, TypeError) as error:
        raise ValueError(
            f"version={described(version)} is not a version; pass a string such as '0.5.3'"
        ) from error


def is_xla_ffi_collectives_supported() -> bool:
    """Whether the installed jax passes XLA's communicator to custom calls (jax 0.11.2 and newer)."""
    return jax_version_meet_requirement("0.11.2")
