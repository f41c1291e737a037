"""What recipes have by default, read from the environment once, when this module is imported.

An import has nobody to answer to (a command could not say it in a sentence), so a value that cannot be read is refused
with the first recipe that is made.
"""

from __future__ import annotations

from typing import Any

from .. import env

_refusals: list[str] = []


def of(name: str) -> Any:
    """The variable's value; the table's default for one that `demand_readable` refuses."""
    try:
        return env.get(name)
    except ValueError as error:
        _refusals.append(str(error))
        return env.variable(name).default


def are_readable() -> bool:
    """Had every variable a value that it can have when this module was imported?"""
    return not _refusals


def demand_readable() -> None:
    """ValueError for the first variable that had another."""
    if _refusals:
        raise ValueError(_refusals[0])
