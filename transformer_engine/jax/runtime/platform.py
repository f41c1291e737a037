"""Hardware, library versions and XLA flags; the only module that queries them from JAX.

Importing the module queries nothing, because the first query initializes the backends of JAX.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import jax
from packaging.version import Version

from ...common import env
from ...common.checks import whole
from ...common.hardware import Hardware, capability_number, hardware_named, nvidia

_DRIVER = Path("/proc/driver/nvidia/version")  # of Linux
WITHOUT_GPU = nvidia(9, 0)  # its rules apply on a CPU, which emulates all formats


@functools.cache
def _gpus() -> tuple[Any, ...]:
    return tuple(device for device in jax.local_devices() if device.platform == "gpu")


def expects_gpu() -> bool:
    """Whether JAX will probably compute on an NVIDIA GPU, without initializing JAX's backends as `has_gpu` does.

    A driver is loaded, JAX's CUDA plugin is installed, and JAX_PLATFORMS does not exclude it.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    if not any(name in platforms for name in ("cuda", "gpu")):
        return False
    return _DRIVER.exists() and _has_cuda_plugin()


def _has_cuda_plugin() -> bool:
    """Whether a CUDA plugin is installed where JAX looks for plugins: the package `jax_plugins`, and entry points."""
    package = importlib.util.find_spec("jax_plugins")
    folders = () if package is None else package.submodule_search_locations or ()
    if any("cuda" in module.name for module in pkgutil.iter_modules(folders)):
        return True
    return any("cuda" in point.name for point in entry_points(group="jax_plugins"))


def has_gpu() -> bool:
    """Whether JAX computes on a GPU by default."""
    return bool(_gpus())


def compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU, 90 for Hopper; also 90 on a CPU.

    Raises:
        TypeError: gpu_id is not an integer.
        ValueError: The process has no GPU with that number.
    """
    return capability_number(hardware(gpu_id))


def hardware(gpu_id: int = 0) -> Hardware:
    """Row for a local GPU in the hardware table; Hopper's on a CPU, which emulates all formats.

    Raises:
        TypeError: gpu_id is not an integer.
        ValueError: The process has no GPU with that number.
    """
    whole("gpu_id", gpu_id, 0)
    gpus = _gpus()
    if not gpus:
        return WITHOUT_GPU
    if gpu_id >= len(gpus):
        raise ValueError(
            f"gpu_id={gpu_id}; this process has GPUs 0 to {len(gpus) - 1}, choose one of them"
        )
    return _hardware(gpu_id)


@functools.cache
def _hardware(gpu_id: int) -> Hardware:
    architecture = str(_gpus()[gpu_id].compute_capability)
    return hardware_named(
        "amd" if architecture.startswith("gfx") else "nvidia", architecture.split(":")[0]
    )


def is_emulating() -> bool:
    """Whether the reference computes formats that the hardware lacks: TE_EMULATE, or True without a GPU."""
    setting = env.get("TE_EMULATE")
    return not has_gpu() if setting is None else bool(setting)


def xla_flag(name: str) -> str | None:
    """Value for --name in XLA_FLAGS, "true" for a flag without a value; None if the flag is not set."""
    last_value = None
    for flag in os.environ.get("XLA_FLAGS", "").split():
        key, _, value = flag.lstrip("-").partition("=")
        if key == name:
            last_value = value or "true"
    return last_value


_LIBRARIES = {
    "cuda": "cuda_runtime_get_version",
    "cudnn": "cudnn_get_version",
    "cublas": "cublas_get_version",
}


def library_version(name: str) -> int:
    """Query a library version as an integer.

    Args:
        name: "cuda", "cudnn" or "cublas" for the library that XLA uses, or "cudnn_frontend" for the Python package.

    Returns:
        The number in the library's own format; 0 without a GPU, or if the Python package is not installed.
    """
    if name == "cudnn_frontend":
        try:
            numbers = Version(version("nvidia-cudnn-frontend")).release
        except PackageNotFoundError:
            return 0
        major, minor, patch = (*numbers, 0, 0)[:3]
        return 10000 * major + 100 * minor + patch
    if not has_gpu():
        return 0
    # A private module, since jax has no public function for these versions.
    versions: Any = importlib.import_module("jax._src.lib").cuda_versions
    return int(getattr(versions, _LIBRARIES[name])())


@dataclass(frozen=True)
class Processors:
    """Number of multiprocessors on a GPU, and the bytes of shared memory that one program may use."""

    count: int
    shared_memory: int


_H100 = 132  # multiprocessors; used to plan programs on a machine without a GPU


def processors() -> Processors:
    """Processors of the first GPU; on a CPU the processors of an H100, for programs lowered for CUDA there."""
    gpus = _gpus()
    count = _H100 if not gpus else int(getattr(gpus[0], "core_count", None) or _H100)
    return Processors(count, hardware().shared_memory)
