"""MkDocs hook: the footer of every page names the version of the package that the site describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VERSION_FILE = Path(__file__).resolve().parent.parent / "transformer_engine" / "_version.py"


def on_config(config: Any) -> Any:
    """Set the footer; the version is read without importing the package."""
    version = re.search(r'__version__ = "(.+)"', VERSION_FILE.read_text())
    assert version is not None, f"{VERSION_FILE} defines no __version__"
    config.copyright = f"{config.site_name} {version[1]}"
    return config
