"""Checks that several of the flat names share: floating-point operands, quantizers, numbers of enumerations."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.pytorch.runtime.checks import floating, same_shape, tensor

E = TypeVar("E", bound=enum.IntEnum)


def values(**operands: Any) -> None:
    """TypeError unless every operand is a tensor of floating-point values."""
    for name, operand in operands.items():
        floating(name, operand)


def matrix(name: str, value: Any) -> None:
    """A floating-point matrix [M, H]."""
    floating(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name} is {list(value.shape)}; give a matrix [M, H]")


def vector(name: str, value: Any, size: int) -> None:
    """Floating-point values [size]."""
    floating(name, value)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} is {list(value.shape)}; give [{size}], one value each")


def with_axes(name: str, value: Any, least: int) -> None:
    """A tensor of at least so many axes."""
    tensor(name, value)
    if value.dim() < least:
        raise ValueError(f"{name} is {list(value.shape)}; give a tensor of at least {least} axes")


def quantizer_or_none(quantizer: Any, name: str = "quantizer") -> None:
    """None, or something that quantizes."""
    if quantizer is not None and (isinstance(quantizer, type) or not hasattr(quantizer, "quantize")):
        raise TypeError(f"{name}={described(quantizer)} is no Quantizer; give an instance of one, or None")


def output_or_none(name: str, value: Any, like: Tensor | None) -> None:
    """None, or a tensor (of the shape of `like`) to write to."""
    if value is None:
        return
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"{name}={described(value)} is a {type(value).__name__}; give a tensor to write to, or None"
        )
    if like is not None:
        same_shape(name, value, "the result", like)


def sequence(name: str, value: Any) -> None:
    """A list or tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name}={described(value)} is a {type(value).__name__}; give a list of tensors")


def member(name: str, kind: type[E], value: Any) -> E:
    """The member of an enumeration that a member of another, or a number, stands for."""
    if isinstance(value, (str, float)) or not hasattr(value, "__int__") or int(value) not in list(kind):
        raise ValueError(
            f"{name}={described(value)} is no {kind.__name__}; give one of {', '.join(kind.__members__)}"
        )
    return kind(int(value))
