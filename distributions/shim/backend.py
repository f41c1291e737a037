"""Build backend of the shim `transformer-engine`: a wheel of metadata, unless the original is installed.

A wheel cannot refuse its installation, so the check runs where a source distribution is built: in a process of the
environment's own Python, whose site-packages remains known in an isolated build.
"""

from __future__ import annotations

import io
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path
from typing import Any

ORIGINALS = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-jax",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
MARK = "+py"  # in the local version of this package and of the shim


def installed_originals(folders: list[str]) -> list[str]:
    """Name and version of each distribution of the original in the folders."""
    found = []
    for distribution in metadata.distributions(path=folders):
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in ORIGINALS and MARK not in distribution.version:
            found.append(f"{name} {distribution.version}")
    return sorted(set(found))


def refuse_to_hide_the_original() -> None:
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    found = installed_originals(folders)
    if found:
        names = " ".join(name.split()[0] for name in found)
        raise RuntimeError(
            f"{', '.join(found)} of the original Transformer Engine is installed in {', '.join(folders)}, and this "
            f"distribution would replace its metadata. Use another environment, or run `pip uninstall {names}` first."
        )


def _metadata() -> str:
    return Path("PKG-INFO").read_text(encoding="utf-8")


def _stem() -> str:
    fields = message_from_string(_metadata())
    return f"{fields['Name'].replace('-', '_')}-{fields['Version']}"


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    stem = _stem()
    with tarfile.open(
        Path(sdist_directory) / f"{stem}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT
    ) as archive:
        for name in ("PKG-INFO", "backend.py", "pyproject.toml"):
            content = Path(name).read_bytes()
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{stem}.tar.gz"


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    refuse_to_hide_the_original()
    stem = _stem()
    folder = f"{stem}.dist-info"
    files = {
        f"{folder}/METADATA": _metadata(),
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{folder}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{folder}/RECORD"))
    with zipfile.ZipFile(Path(wheel_directory) / f"{stem}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return f"{stem}-py3-none-any.whl"
