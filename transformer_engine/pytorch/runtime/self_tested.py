"""`te doctor --self-test` results on this machine, which enable backends that no test has run on such a GPU.

A backend or a layout that was compiled for a GPU, but never run on it, is used there once its path has passed:

    if (reason := untested_reason("fp8 products in all layouts")) is not None: ...

The key of a result contains the GPU, the driver and the versions of all libraries that compute. Any
new version makes the machine untested again.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import metadata

import torch

from ..._version import __version__
from ...common.hardware import driver_version
from ...common.store import Store
from .device import current_hardware, get_cudnn_version, has_cuda
from .tracing import constant_while_tracing

STORE = Store(
    folder="self_test",
    magic=b"TESELFTEST1\n",
    contents="results of self-tests",
    logger=__name__,
    remedy="set TE_CACHE_DIR to a writable folder",
    limit=64,
)
# Distributions whose code computes; cuBLASLt comes in one of two.
LIBRARIES = (
    "triton",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvmath-python",
    "nvidia-cudnn-frontend",
    "flash-attn",
    "flash-attn-4",
)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine_facts() -> dict[str, str]:
    """GPU, driver and versions for the current device, in the order in which reports print them."""
    facts = {"gpu": "none"}
    if has_cuda():
        index = torch.cuda.current_device()
        facts = {"gpu": torch.cuda.get_device_name(index), "architecture": current_hardware().title}
        facts["driver"] = driver_version() or "none"
        facts["cuDNN"] = ".".join(map(str, get_cudnn_version()))
    facts |= {"transformer-engine": __version__, "torch": str(torch.__version__)}
    facts["CUDA"] = torch.version.cuda or torch.version.hip or "none"
    found = {name: _version(name) for name in LIBRARIES}
    return facts | {name: version for name, version in found.items() if version is not None}


def save(passed: Mapping[str, bool]) -> None:
    """Store whether each path has passed on the current device."""
    path = STORE.path_of(*machine_facts().items())
    if path is not None:
        STORE.write(path, json.dumps(dict(passed)).encode())
    _read_stored.cache_clear()


@functools.cache
def _read_stored(index: int) -> dict[str, bool]:
    path = STORE.path_of(*machine_facts().items())
    content = None if path is None else STORE.read(path)
    return {} if content is None else json.loads(content)


_tested_now: list[str] = []


@contextlib.contextmanager
def testing(path: str) -> Iterator[None]:
    """Let the self-test run a path that has not passed yet."""
    _tested_now.append(path)
    try:
        yield
    finally:
        _tested_now.pop()


@constant_while_tracing
def untested_reason(path: str) -> str | None:
    """Reason that a self-test path has not passed on the current device with these versions, or None.

    Args:
        path: Path name, as the column "path" in the self-test prints it, such as "mxfp8 products".
    """
    if not has_cuda():
        return f"there is no GPU on which {path} could be tested"
    if path in _tested_now:
        return None
    passed = _read_stored(torch.cuda.current_device()).get(path)
    if passed:
        return None
    state = "has not run" if passed is None else "has failed"
    return f"the self-test of {path} {state} on this GPU with these versions; run te doctor --self-test"
