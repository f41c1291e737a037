"""The command that installs an extra of this package: from a checkout, for indexes have the original by its name."""

from __future__ import annotations


def command(extra: str) -> str:
    """What to type for an extra of pyproject.toml."""
    return f'pip install ".[{extra}]" in a checkout of this package'
