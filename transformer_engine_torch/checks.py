"""Argument checks that several extension functions share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.numbers import with_article
from transformer_engine.pytorch.runtime.checks import floating, same_shape, tensor

E = TypeVar("E", bound=enum.IntEnum)


def values(**operands: Any) -> None:
    """Raise TypeError unless every operand is a floating-point tensor."""
    for name, operand in operands.items():
        floating(name, operand)


def vector(name: str, value: Any, size: int) -> None:
    """Raise an error unless the value is a floating-point tensor [size]."""
    floating(name, value)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} is {list(value.shape)}; give [{size}], one value each")


def with_axes(name: str, value: Any, least: int) -> None:
    """Raise an error unless the value is a tensor with at least `least` axes."""
    tensor(name, value)
    if value.dim() < least:
        raise ValueError(f"{name} is {list(value.shape)}; give a tensor of at least {least} axes")


def quantizer_or_none(quantizer: Any, name: str = "quantizer") -> None:
    """Raise TypeError unless the value is None or has a method `quantize`."""
    if quantizer is not None and (
        isinstance(quantizer, type) or not hasattr(quantizer, "quantize")
    ):
        raise TypeError(
            f"{name}={described(quantizer)} is not a Quantizer; give an instance of one, or None"
        )


def output_or_none(name: str, value: Any, like: Tensor | None) -> None:
    """Raise an error unless the value is None or a tensor, with the shape of `like` if it is given."""
    if value is None:
        return
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"{name}={described(value)} is {with_article(type(value))}; give a tensor to write to, or None"
        )
    if like is not None:
        same_shape(name, value, "the result", like)


def sequence(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a sequence such as a list or a tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(
            f"{name}={described(value)} is {with_article(type(value))}; give a list of tensors"
        )


def member(name: str, kind: type[E], value: Any) -> E:
    """Convert another enumeration's member, or a number, to a `kind` member."""
    if (
        isinstance(value, (str, float))
        or not hasattr(value, "__int__")
        or int(value) not in list(kind)
    ):
        raise ValueError(
            f"{name}={described(value)} is not {with_article(kind)}; give one of {', '.join(kind.__members__)}"
        )
    return kind(int(value))
