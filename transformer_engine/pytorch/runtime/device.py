"""The machine: the only module that queries CUDA."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.hardware import TABLE, Hardware, hardware_named
from ...common.numbers import with_article
from .tracing import constant_while_tracing


@functools.cache
def has_cuda() -> bool:
    """Return whether this torch can use a CUDA device."""
    return torch.cuda.is_available()


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device (major, minor); (0, 0) without one."""
    # Compilers can trace torch's query for the current device, but not the query for the device count.
    return _capability(torch.cuda.current_device()) if has_cuda() else (0, 0)


@functools.cache
def _architecture(index: int) -> tuple[str, str]:
    """Key of a device's row in `hardware.TABLE`: vendor and architecture."""
    if torch.version.hip is not None:
        # For gfx942 torch reports the compute capability 9.4, a number that NVIDIA does not use.
        key = "amd", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    else:
        key = "nvidia", "{}.{}".format(*_capability(index))
    hardware_named(*key)  # adds a row for an unlisted architecture
    return key


@constant_while_tracing
def _current_architecture() -> tuple[str, str]:
    return _architecture(torch.cuda.current_device()) if has_cuda() else ("none", "")


def current_hardware() -> Hardware:
    """Hardware-table row for the current CUDA device; `NO_GPU` without one."""
    # Traced code can have a string as a constant, but not a row, so the row is looked up by its key.
    return TABLE[_current_architecture()]


# Whether torch.autocast is active on any device kind: 0.1 us; the query for one kind takes 0.5 us.
autocast_is_active = torch._C._is_any_autocast_enabled


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the torch.autocast dtype on a device kind, such as "cuda", while autocast is active there."""
    # Meta tensors have no autocast.
    if not autocast_is_active() or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_kind(device: torch.device) -> str:
    """Device type for torch.autocast: "cpu" for meta tensors, which have no autocast."""
    return "cpu" if device.type == "meta" else device.type


_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cast_to_autocast_dtype(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Cast plain floating-point tensors to the torch.autocast dtype where it is active; float64 stays."""
    results: list[Tensor | None] = []
    for x in tensors:
        dtype = autocast_dtype(x.device.type) if type(x) is Tensor else None
        results.append(
            x if x is None or dtype is None or x.dtype not in _CAST_DTYPES else x.to(dtype)
        )
    return results


@functools.cache
@constant_while_tracing  # compilers cannot trace the device count query
def _device_count() -> int:
    return torch.cuda.device_count() if has_cuda() else 0


@functools.cache
def only_device() -> bool:
    """Return whether there is exactly one CUDA device, which then executes every launch."""
    return _device_count() == 1


def is_current_device(index: int | None) -> bool:
    """Return whether this is the CUDA device that executes launches."""
    # torch.cuda.current_device first tests whether CUDA is initialized, and takes five times as long; a tensor exists.
    return only_device() or torch._C._cuda_getDevice() == index


@functools.cache
def get_cudnn_version() -> tuple[int, int, int]:
    """Return the cuDNN version (major, minor, patch) that torch loads; (0, 0, 0) without one."""
    encoded = torch.backends.cudnn.version() if has_cuda() else None
    if not encoded:
        return (0, 0, 0)
    unit = 10_000 if encoded >= 90_000 else 1_000  # cuDNN 9 widened the minor version to two digits
    return (encoded // unit, encoded % unit // 100, encoded % 100)


@functools.cache
def cuda_version() -> tuple[int, int]:
    """Return the CUDA toolkit version of the torch build (major, minor); (0, 0) for a CPU build."""
    if torch.version.cuda is None:
        return (0, 0)
    major, minor = torch.version.cuda.split(".")[:2]
    return (int(major), int(minor))


def _check_available(device: torch.device, name: str) -> None:
    """Raise ValueError unless this torch build allocates tensors on a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"{name}={str(device)!r}: this installation of torch has no such device ({reason}); give 'cpu', or "
            "'cuda' for an NVIDIA GPU"
        ) from None


def _to_device(device: torch.device | str | int, name: str) -> torch.device:
    """Convert a device in any form that torch accepts to torch.device; raise TypeError or ValueError otherwise."""
    if not isinstance(device, (str, bool, torch.device, torch.Tensor)) and hasattr(
        type(device), "__index__"
    ):
        device = operator.index(device)  # a NumPy integer, for one
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"{name}={device!r} is {with_article(type(device))}; give 'cuda', 'cpu', 'meta', a GPU's number or a "
            "torch.device"
        )
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"{name}={device!r} is not a device of torch; give 'cuda', 'cuda:0', 'cpu' or 'meta'"
        ) from None


def canonical_device(
    device: torch.device | str | int | None = "cuda", name: str = "device"
) -> torch.device:
    """Return the device on which a module allocates: "cuda", the default, means the CPU without a GPU.

    Args:
        device: A device in any form that torch accepts.
        name: Argument name, for messages.

    Raises:
        TypeError, ValueError: The value is not a device, or is a GPU index that does not exist.
    """
    device = _to_device("cuda" if device is None else device, name)
    if device.type not in ("cuda", "cpu", "meta"):
        _check_available(device, name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        if not has_cuda():
            raise ValueError(
                f"{name}={str(device)!r}: torch finds no CUDA device; give 'cpu', or 'cuda', which means the CPU where "
                "there is no GPU (te doctor says why a GPU is not found)"
            )
        if device.index >= _device_count():
            raise ValueError(
                f"{name}={str(device)!r}: torch finds {_device_count()} CUDA device(s); give a number below that, or "
                "'cuda' for the current one"
            )
        return device
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def is_meta(device: torch.device | str | int | None) -> bool:
    """Return whether tensors on this device have shapes only, so that parameters are initialized later.

    Raises:
        TypeError, ValueError: The value is not a device.
    """
    return device is not None and _to_device(device, "device").type == "meta"
