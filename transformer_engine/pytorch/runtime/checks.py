"""Checks for single values with torch types: tensors, dtypes, devices and process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...common.checks import described
from ...common.numbers import to_int, with_article
from .device import canonical_device

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# Attributes with the hooks of a module and of a parameter.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DISTRIBUTED = "torch.distributed.tensor"
_NO_GROUP = (bool, int, float, str, bytes, list, tuple, dict, set, Tensor, torch.dtype)


def is_distributed(tensor: Any) -> bool:
    """Return whether a value is a DTensor, without importing its module, which takes half a second."""
    if type(tensor) in PLAIN_TENSORS or _DISTRIBUTED not in sys.modules:
        return False
    return isinstance(tensor, sys.modules[_DISTRIBUTED].DTensor)


def tensor(name: str, value: Any) -> TypeGuard[Tensor]:
    """Raise TypeError unless value is a tensor, plain or quantized."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is {described(value)} and not a torch.Tensor; convert it, for example by torch.as_tensor"
        )
    return True


def tensor_or_none(name: str, value: Any) -> None:
    """Raise TypeError unless value is a tensor or None."""
    if value is not None:
        tensor(name, value)


def floating(name: str, value: Any) -> None:
    """Raise TypeError unless value is a floating-point tensor."""
    tensor(name, value)
    if not value.is_floating_point():
        raise TypeError(
            f"{name} is {value.dtype}; give floating-point values, for example {name}.float()"
        )


def integers(name: str, value: Any) -> None:
    """Raise TypeError unless value is an int32 or int64 tensor."""
    tensor(name, value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {value.dtype}; give int32 values, for example {name}.int()")


def same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless two tensors have the same shape."""
    if value.shape != other.shape:
        raise ValueError(
            f"{name} is {list(value.shape)}, {other_name} {list(other.shape)}; give both the same shape"
        )


def same_device(name: str, value: Tensor, other_name: str, device: torch.device) -> None:
    """Raise ValueError unless a tensor is on the same device as another one."""
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, {other_name} on {device}; move one of them with .to()"
        )


def parameter_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless value is None or a dtype in which parameters can be computed."""
    if value is None:
        return
    if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
        raise TypeError(
            f"{name}={described(value)} is not a dtype of parameters; give torch.float32, torch.bfloat16 or "
            "torch.float16 (quantized_model_init quantizes parameters)"
        )


def tensor_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless value is an unquantized dtype."""
    if value is None:
        raise TypeError(
            f"{name}=None is not a dtype; give torch.bfloat16, torch.float16 or torch.float32"
        )
    parameter_dtype(name, value)


def device(name: str, value: Any) -> None:
    """Raise ValueError or TypeError unless value is a device name."""
    canonical_device(value, name)


def group_or_none(name: str, value: Any) -> None:
    """Raise TypeError for a number, text or container in place of a process group; other objects are accepted."""
    if isinstance(value, _NO_GROUP):
        raise TypeError(
            f"{name}={described(value)} is {with_article(type(value))}; give a torch.distributed.ProcessGroup, or None"
        )


def groups_or_none(name: str, value: Any) -> None:
    """Check a process group, or a process group list; see `group_or_none`."""
    for member in value if isinstance(value, list) and value else [value]:
        group_or_none(name, member)


def values_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless value is a floating-point dtype in which quantized values can be presented."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(
            f"{name}={described(value)} is not a floating-point dtype; give torch.float32, torch.bfloat16 or "
            "torch.float16"
        )


def extents(name: str, value: Any) -> tuple[int, ...]:
    """Convert a shape to a tuple of nonnegative integers.

    Raises:
        TypeError: The value is not a sequence, or a size is not a whole number.
        ValueError: A size is below 0.
    """
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping, Set)):
        raise TypeError(
            f"{name}={described(value)} is not a sequence; give a list of whole numbers"
        )
    sizes = tuple([to_int(f"a size of {name}", size) for size in value])
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name}={sizes} holds a size below 0; give sizes of at least 0")
    return sizes


def flag_tensor(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless value is None or a one-element tensor."""
    if value is None:
        return
    tensor(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name} is {list(value.shape)}; give a tensor of one element")
