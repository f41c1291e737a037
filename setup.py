"""Metadata that depends on the place of publication: the environment variable REPOSITORY_URL, the repository's address.

A checkout has no canonical address. Where the variable is set, the project URLs are added and the relative links of
README.md become absolute, because an index page has no other files.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(?P<before>\]\(|src=\"|srcset=\")(?!https?:|#|mailto:)(?P<path>[^)\"\s]+)")
PICTURES = (".png", ".svg", ".gif")
DARK_PICTURE = re.compile(
    r"!\[[^\]]*\]\([^)]*#gh-dark-mode-only\)\n"
)  # an index page shows pictures of both schemes


def project_urls(repository: str) -> dict[str, str]:
    """Project URLs on a host whose paths are those of GitHub and Gitea."""
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Documentation": f"{repository}/tree/main/docs",
    }


def with_absolute_links(text: str, repository: str) -> str:
    """Replace the relative links of a Markdown text; pictures point to the raw file."""

    def absolute(match: re.Match[str]) -> str:
        view = "raw" if match["path"].partition("#")[0].endswith(PICTURES) else "blob"
        return f"{match['before']}{repository}/{view}/main/{match['path']}"

    return LINK.sub(absolute, text)


def metadata() -> dict[str, object]:
    """The fields that pyproject.toml leaves dynamic."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    description = DARK_PICTURE.sub("", readme)
    repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
    return {
        "long_description": with_absolute_links(description, repository)
        if repository
        else description,
        "long_description_content_type": "text/markdown",
        "project_urls": project_urls(repository) if repository else {},
    }


if __name__ == "__main__":
    # Not below the checkout, where a later build would pack modules that have been deleted since.
    with tempfile.TemporaryDirectory() as folder:
        setup(**metadata(), options={"build": {"build_base": folder}})
