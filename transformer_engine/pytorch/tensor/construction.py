"""What quantized tensors are made of: checks of what callers give, and the strides of what they get."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..runtime.checks import extents


def check_keywords(cls: type[Any], by_place: tuple[Any, ...]) -> None:
    """TypeError for a class without a payload, and for parts of a payload that are not given by their keywords."""
    if not hasattr(cls, "STORAGE"):
        raise TypeError(
            f"{cls.__name__} names no STORAGE, the class of its payload; let what a custom quantizer makes be a "
            "QuantizedTensorStorage"
        )
    if len(by_place) > 2 or any(isinstance(value, Tensor) for value in by_place):
        known = inspect.signature(cls.STORAGE).parameters.values()
        named = [p.name for p in known if p.kind is not p.VAR_KEYWORD and p.name != "dtype"]
        keywords = ", ".join(f"{name}=.." for name in named)
        raise TypeError(
            f"{cls.__name__} takes shape and dtype by place and nothing else; give its payload by keyword: {keywords}"
        )


def check_shape(shape: Sequence[int] | None, of_payload: Sequence[int]) -> None:
    """ValueError unless a shape that is given is of as many values as the payload."""
    if shape is None:
        return
    shape = extents("shape", shape)
    if prod(shape) != prod(of_payload):
        raise ValueError(
            f"shape={shape} is of {prod(shape)} values, the payload of {tuple(of_payload)}; give the shape of "
            "the payload's values, or None"
        )


def check_objects(objects: Sequence[Any]) -> None:
    """TypeError for tensors where the objects of prepare_for_saving belong."""
    for given in objects:
        if isinstance(given, Tensor):
            raise TypeError(
                f"tensors holds a {type(given).__name__}; give the objects that prepare_for_saving returned second, "
                "then the saved tensors"
            )


def checked_strides(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return nominal strides as a tuple; ValueError unless there is one for each dimension."""
    if len(stride) != len(shape):
        raise ValueError(
            f"stride={tuple(stride)} has {len(stride)} numbers for shape {tuple(shape)}; give one for each dimension"
        )
    return tuple(stride)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of values that lie row after row."""
    if len(shape) == 2:
        return (max(shape[1], 1), 1)
    if not len(shape):
        return ()
    inner = (max(extent, 1) for extent in reversed(shape[1:]))
    return tuple(itertools.accumulate(inner, int.__mul__, initial=1))[::-1]
