"""The facts of an installation as data: `gather()` reads them once for all checks.

This module needs no framework: a missing or damaged package is a fact like any other.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from packaging.utils import canonicalize_name

from transformer_engine import _version
from transformer_engine.common import env, optional
from transformer_engine.common.hardware import NO_GPU, Hardware, driver_version

T = TypeVar("T")

# Modules that are imported if they are installed.
TRIED = (
    "torch",
    "triton",
    "nvmath",
    "cudnn",
    "flash_attn",
    "flash_attn_interface",
    "jax",
    "flax",
    "transformer_engine.pytorch",
    "transformer_engine.jax",
)
# Imported if its distribution is installed: FlashAttention 4 shares its package with others.
FLASH4 = ("flash_attn.cute.interface", "flash-attn-4")
_FRAMEWORK_OF = {
    "transformer_engine.pytorch": ("torch",),
    "transformer_engine.jax": ("jax", "flax"),
}
_VERSION = re.compile(r"""__version__\s*=\s*["']([^"']+)""")


@dataclass(frozen=True)
class Distribution:
    """One installed distribution: `requires` are the lines of its metadata."""

    version: str
    place: str = ""
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """CUDA as torch reports it; `name` is None without a device."""

    build: tuple[int, int] = (0, 0)
    name: str | None = None
    hardware: Hardware = NO_GPU
    cudnn: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Installation:
    """Facts about an installation.

    Attributes:
        python: (major, minor) of the interpreter.
        version: Version of the running code.
        folder: Folder of the running code.
        distributions: Distributions by normalized name; several if there is metadata for several versions.
        copies: Folder and version of other packages called transformer_engine on the path.
        extension: The file that `import transformer_engine_torch` would load, or None.
        failures: Why importing an installed module fails, and why torch.cuda and jax.devices raise.
        driver: NVIDIA driver version; None without a driver.
        gpu: CUDA as torch reports it.
        jax_devices: Platforms of JAX's devices.
        variables: Environment variable error, or None.
        cache: Why the cache folder is not writable, or None.
    """

    python: tuple[int, int] = (3, 12)
    version: str = _version.__version__
    folder: str = "transformer_engine"
    distributions: Mapping[str, tuple[Distribution, ...]] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    extension: str | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpu: Gpu = Gpu()
    jax_devices: tuple[str, ...] = ()
    variables: str | None = None
    cache: str | None = None

    def version_of(self, name: str) -> str | None:
        """Version of the distribution that Python finds first; None if it is not installed."""
        distributions = self.distributions.get(name, ())
        return distributions[0].version if distributions else None


def gather() -> Installation:
    """Read the environment of this process."""
    folder = Path(_version.__file__).resolve().parent
    distributions = _distributions()
    tried = [module for module in TRIED if _is_installed(module)]
    if FLASH4[1] in distributions:
        tried.append(FLASH4[0])
    failures: dict[str, str] = {}
    for module in tried:
        try:
            reason = optional.failure(module)
        except Exception as error:  # a damaged package may raise anything
            reason = optional.import_failure(module, error)
        if reason is not None:
            failures[module] = reason
    extension = importlib.util.find_spec("transformer_engine_torch")
    gpu = _query("transformer_engine.pytorch", "torch.cuda", _gpu, failures)
    jax_devices = _query("transformer_engine.jax", "jax.devices", _jax_devices, failures)
    places = (Path(entry or ".").resolve() / "transformer_engine" for entry in sys.path)
    other_folders = {path for path in places if (path / "__init__.py").is_file()} - {folder}
    copies = []
    for path in sorted(other_folders):
        file = path / "_version.py"
        written = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        copies.append((str(path), written.group(1) if written else "another package"))
    return Installation(
        python=sys.version_info[:2],
        folder=str(folder),
        distributions=distributions,
        copies=tuple(copies),
        extension=None if extension is None else extension.origin,
        failures=failures,
        driver=driver_version(),
        gpu=gpu or Gpu(),
        jax_devices=jax_devices or (),
        variables=_variables(),
        cache=_cache(),
    )


def _distributions() -> dict[str, tuple[Distribution, ...]]:
    distributions: dict[str, list[Distribution]] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name is None:  # the remainder from a partly removed package
            continue
        distribution = Distribution(
            each.version, str(each.locate_file("")), tuple(each.requires or ())
        )
        versions = distributions.setdefault(canonicalize_name(name), [])
        if distribution not in versions:
            versions.append(distribution)
    return {name: tuple(several) for name, several in distributions.items()}


def _query(ours: str, name: str, ask: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Query the devices of a library; return None if it is unusable, or raises, which is recorded as a failure."""
    if not _is_installed(ours) or ours in failures:
        return None
    try:
        return ask()
    except Exception as error:
        failures[name] = f"{name} raises {type(error).__name__}: {' '.join(str(error).split())}"
        return None


def _is_installed(module: str) -> bool:
    return all(optional.installed(name) for name in _FRAMEWORK_OF.get(module, (module,)))


def _gpu() -> Gpu:
    import torch

    from transformer_engine.pytorch.runtime import device

    name = torch.cuda.get_device_name() if device.has_cuda() else None
    return Gpu(device.cuda_version(), name, device.current_hardware(), device.get_cudnn_version())


def _jax_devices() -> tuple[str, ...]:
    import jax

    return tuple(sorted({device.platform for device in jax.devices()}))


def _variables() -> str | None:
    try:
        env.check_all()
    except ValueError as error:
        return str(error)
    return None


def _cache() -> str | None:
    try:
        folder = env.cache_directory()
    except RuntimeError as error:  # no home to expand ~ to
        return str(error)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
