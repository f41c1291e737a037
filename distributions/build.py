"""Build two distributions for package indexes, where `transformer-engine` is the original.

    python distributions/build.py [--out dist]

`transformer-engine-python` has the import packages, under a name that the index does not have. `transformer-engine` is
a shim of metadata alone, for clients that read the version of this distribution. The shim is a source distribution,
because only its build can see an installed original; see docs/releases.md.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHIM = Path(__file__).with_name("shim")
ORIGINAL = "transformer-engine"
NAME = "transformer-engine-python"
PACKAGES = (
    "transformer_engine",
    "transformer_engine_jax",
    "transformer_engine_tools",
    "transformer_engine_torch",
)
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


def version() -> str:
    """The version of the shim, which names the original's release, such as "2.20.2+py0.2.0"."""
    return runpy.run_path(str(ROOT / "transformer_engine" / "_version.py"))["__version__"]


def renamed(project: str) -> str:
    """The text of pyproject.toml under the own name, with the release of this package as its version.

    An index accepts no local version.
    """
    replacements = {
        f'name = "{ORIGINAL}"': f'name = "{NAME}"\nversion = "{version().partition("+py")[2]}"',
        'dynamic = ["version", ': "dynamic = [",
        f"{ORIGINAL}[": f"{NAME}[",
        '[tool.setuptools.dynamic]\nversion = { attr = "transformer_engine._version.__version__" }\n': "",
    }
    for old, new in replacements.items():
        assert old in project, old
        project = project.replace(old, new)
    return project


def build_packages(out: Path) -> Path:
    """Build the wheel of the import packages and return its path."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in PACKAGES:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy2(ROOT / name, copy / name)
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (copy / "pyproject.toml").write_text(renamed(project), encoding="utf-8")
        return out / _run_backend("setuptools.build_meta", "build_wheel", copy, out)


def build_shim(wheel: Path, out: Path) -> Path:
    """Build the shim's source distribution, which requires the wheel's version with the same extras."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("backend.py", "pyproject.toml"):
            shutil.copy2(SHIM / name, copy / name)
        (copy / "PKG-INFO").write_text(
            shim_metadata(metadata_of(wheel)).as_string(), encoding="utf-8"
        )
        return out / _run_backend("backend", "build_sdist", copy, out)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def shim_metadata(packages: Message) -> Message:
    shim = Message()
    shim["Metadata-Version"] = "2.1"
    shim["Name"], shim["Version"] = ORIGINAL, version()
    shim["Summary"] = (
        f"Metadata for clients that look for {ORIGINAL}; the import packages are in {NAME}"
    )
    shim["Requires-Python"] = packages["Requires-Python"]
    pinned = f"{NAME}%s=={packages['Version']}"
    shim["Requires-Dist"] = pinned % ""
    for extra in packages.get_all("Provides-Extra", []):
        shim["Provides-Extra"] = extra
        shim["Requires-Dist"] = f'{pinned % f"[{extra}]"}; extra == "{extra}"'
    return shim


def _run_backend(backend: str, hook: str, source: Path, out: Path) -> str:
    """Call a hook of a build backend in a source tree and return the name of the file that it writes."""
    program = (
        f"import sys\nsys.path.insert(0, '.')\nimport {backend} as backend\n"
        f"print('built', backend.{hook}({str(out)!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.rsplit("built ", 1)[1].strip()


def main(argv: list[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the two files")
    out = parser.parse_args(argv).out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheel = build_packages(out)
    built = [wheel, build_shim(wheel, out)]
    print(*built, sep="\n")
    return built


if __name__ == "__main__":
    main()
