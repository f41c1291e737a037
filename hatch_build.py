"""Addresses of a published build: the environment variable REPOSITORY_URL becomes the metadata's project URLs."""

from __future__ import annotations

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Adds `Project-URL` entries to the metadata if REPOSITORY_URL is set. A checkout has no canonical address."""

    def update(self, metadata: dict) -> None:
        repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        metadata["urls"] = project_urls(repository) if repository else {}


def project_urls(repository: str) -> dict[str, str]:
    """Return the project URLs of a repository whose host has the paths of GitHub."""
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Documentation": f"{repository}/tree/main/docs",
    }
