"""Documentation page addresses, for messages."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, metadata

DISTRIBUTION = "transformer-engine"


def page(name: str) -> str:
    """Address of docs/NAME.md in the installed distribution's repository, or this path if no address is known.

    A publisher sets the repository when the wheel is built (REPOSITORY_URL, see setup.py). Wheels built from a checkout
    have no address.
    """
    repository = _repository()
    path = f"docs/{name}.md"
    return f"{repository}/blob/main/{path}" if repository else path


@functools.cache
def _repository() -> str:
    """Repository address in the distribution's metadata, or an empty text."""
    try:
        urls = metadata(DISTRIBUTION).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    pairs = (url.partition(", ") for url in urls)
    return next((address for label, _, address in pairs if label == "Repository"), "")
