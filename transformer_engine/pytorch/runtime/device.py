"""The machine: the only module that asks CUDA about itself."""

from __future__ import annotations

import functools
import operator

import torch


@functools.cache
def has_cuda() -> bool:
    """Is there a CUDA device that this torch can use?"""
    return torch.cuda.is_available()


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def get_device_compute_capability() -> tuple[int, int]:
    """Compute capability (major, minor) of the current CUDA device; (0, 0) on a machine without one."""
    # Compilers trace torch's question for the current device, and not the one for their number.
    return _capability(torch.cuda.current_device()) if has_cuda() else (0, 0)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """torch.autocast's dtype on a kind of device, such as "cuda", while it is active there."""
    if kind == "meta" or not torch.is_autocast_enabled(
        kind
    ):  # torch knows no autocast of tensors without memory
        return None
    return torch.get_autocast_dtype(kind)


@functools.cache
def _device_count() -> int:
    return torch.cuda.device_count() if has_cuda() else 0


@functools.cache
def only_device() -> bool:
    """Is there one CUDA device, which every launch goes to?"""
    return _device_count() == 1


def is_current_device(index: int | None) -> bool:
    """Is this the CUDA device that launches go to?"""
    # torch.cuda.current_device asks first whether CUDA is initialised, for five times as long: a tensor is there.
    return only_device() or torch._C._cuda_getDevice() == index


@functools.cache
def get_cudnn_version() -> tuple[int, int, int]:
    """Version (major, minor, patch) of the cuDNN that torch loads; (0, 0, 0) without one."""
    encoded = torch.backends.cudnn.version() if has_cuda() else None
    if not encoded:
        return (0, 0, 0)
    unit = 10_000 if encoded >= 90_000 else 1_000  # cuDNN 9 widened the minor version to two digits
    return (encoded // unit, encoded % unit // 100, encoded % 100)


@functools.cache
def cuda_version() -> tuple[int, int]:
    """The CUDA toolkit version (major, minor) torch was built with; (0, 0) for a CPU build."""
    if torch.version.cuda is None:
        return (0, 0)
    major, minor = torch.version.cuda.split(".")[:2]
    return (int(major), int(minor))


def canonical_device(device: torch.device | str | int | None = "cuda", name: str = "device") -> torch.device:
    """The device a module allocates on: "cuda", the default everywhere, means the CPU where there is no GPU.

    Raises ValueError or TypeError, with the argument's name, for what is no device, and for a GPU by a number that no
    GPU has.
    """
    if device is None:
        device = "cuda"
    if hasattr(type(device), "__index__") and not isinstance(device, (bool, torch.Tensor)):
        device = operator.index(device)  # pyright: ignore[reportArgumentType] - a NumPy integer, for one
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"{name}={device!r} is a {type(device).__name__}; give 'cuda', 'cpu', 'meta', a GPU's number or a "
            "torch.device"
        )
    try:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"{name}={device!r} is not a device of torch; give 'cuda', 'cuda:0', 'cpu' or 'meta'"
        ) from None
    if device.type != "cuda":
        return device
    if device.index is not None:
        _check_number(device, name)
        return device
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def _check_number(device: torch.device, name: str) -> None:
    """ValueError unless torch finds the GPU of this number."""
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


def is_meta(device: torch.device | str | int | None) -> bool:
    """Does this device hold shapes only, so that parameters are to be filled later?"""
    return device is not None and not isinstance(device, int) and torch.device(device).type == "meta"
