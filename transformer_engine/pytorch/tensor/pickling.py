"""A quantized tensor as values in an order: what its pickle holds, under names that the original's pickles know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .quantized_tensor import QuantizedTensor

T = TypeVar("T", bound=QuantizedTensor)
DIRECTIONS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def values_of(tensor: QuantizedTensor, names: Sequence[str]) -> tuple[Any, ...]:
    """The tensor's fields; its dtype and shape are those that it presents."""
    return tuple(getattr(tensor, name if name in ("dtype", "shape") else f"_{name}") for name in names)


def from_values(kind: type[T], names: Sequence[str], values: Sequence[Any]) -> T:
    """A tensor of values_of(another, names); trailing fields that an older pickle lacks have their defaults."""
    fields = dict(zip(names, values, strict=False))
    return kind(fields.pop("shape"), fields.pop("dtype"), **fields)  # pyright: ignore[reportReturnType]
