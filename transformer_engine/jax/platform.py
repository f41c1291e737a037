"""What JAX runs on: the only module that asks it for hardware, versions of libraries and XLA's flags.

Nothing here is asked at import: the first question starts JAX's backends.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax

from ..common import env

WITHOUT_GPU = 90  # the compute capability whose rules hold on a CPU, where everything is emulated


@functools.cache
def _gpus() -> tuple[Any, ...]:
    return tuple(device for device in jax.local_devices() if device.platform == "gpu")


def has_gpu() -> bool:
    """Does JAX compute on a GPU by default?"""
    return bool(_gpus())


def compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU, 90 for Hopper; on a CPU 90 too, whose rules hold there."""
    gpus = _gpus()
    if not gpus:
        return WITHOUT_GPU
    if not 0 <= gpu_id < len(gpus):
        raise ValueError(f"gpu_id={gpu_id}; this process has GPUs 0 to {len(gpus) - 1}, choose one of them")
    major, minor = str(gpus[gpu_id].compute_capability).split(".")
    return 10 * int(major) + int(minor)


def is_emulating() -> bool:
    """Is a format that the hardware lacks computed by the reference? By TE_EMULATE; unset: where there is no GPU."""
    asked = env.get("TE_EMULATE")
    return not has_gpu() if asked is None else bool(asked)


def xla_flag(name: str) -> str | None:
    """The value of --name in XLA_FLAGS, "true" for one without a value; None where it is not set."""
    found = None
    for flag in os.environ.get("XLA_FLAGS", "").split():
        key, _, value = flag.lstrip("-").partition("=")
        if key == name:
            found = value or "true"
    return found
