"""Quantizers and quantized tensors in your own operators under torch.compile.

`register_value_opaque_quantizer(cls)` registers a quantizer class as a torch opaque value type. A
`torch.library.custom_op` operator may then take such a quantizer as an argument, and a compiled graph holds
it as a constant. This needs torch 2.13: older versions have no such types, or restrict them to classes with
torch's own metaclass. No class is registered by default: torch does not trace methods of a registered class,
so that operations which copy such a quantizer (`te.ops.Quantize`) do not compile. Register a subclass.

Example:
    >>> import transformer_engine.pytorch as te
    >>> from transformer_engine.pytorch import dynamo
    >>> @dynamo.register_value_opaque_quantizer
    ... class Constant(te.MXFP8Quantizer):
    ...     pass
    >>> dynamo.is_value_opaque_quantizer(Constant(te.DType.kFloat8E4M3))
    True
"""

from __future__ import annotations

import enum
import typing
from typing import Any, ClassVar, TypeVar

import torch
from torch.torch_version import TorchVersion

from ...common.numbers import with_article
from ..tensor.quantizer import Quantizer

__all__ = ["is_value_opaque_quantizer", "register_value_opaque_quantizer"]

_LITERALS = (bool, int, float, str, enum.Enum)
_CONSTANTS = (*_LITERALS, torch.device, type(None))
_registered: set[type[Quantizer]] = set()
Kind = TypeVar("Kind", bound=type[Quantizer])


def register_value_opaque_quantizer(cls: Kind) -> Kind:
    """Register a quantizer class as a torch opaque value type; also a class decorator.

    Quantizers in the class are equal if their attributes are. A compiled graph holds a quantizer as
    a constant and is compiled again for an unequal one.

    Args:
        cls: Class whose annotated fields, and whose attributes, are int, bool, float, str or enum.

    Returns:
        The class.

    Raises:
        TypeError: The class is not a quantizer, or a field has another type.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"{cls!r} is not a class of quantizers; give a subclass of Quantizer")
    if cls in _registered:
        return cls
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # an annotation names a local class; the graph checks the attribute values
        hints = {}
    for name, kind in hints.items():
        parts = typing.get_args(kind) or (kind,)
        if typing.get_origin(kind) is ClassVar or kind is ClassVar:
            continue
        if not all(
            isinstance(part, type) and issubclass(part, (*_LITERALS, type(None))) for part in parts
        ):
            raise TypeError(
                f"{cls.__name__}.{name} is annotated as {kind}; a constant of a graph has fields of int, bool, float, "
                "str or enum only"
            )
    if cls._configuration is Quantizer._configuration:  # compares quantizers by identity
        cls.__eq__, cls.__hash__ = _equal, _hash
    cls.__fx_repr__ = _fx_repr  # pyright: ignore[reportAttributeAccessIssue]
    _registered.add(cls)
    if TorchVersion(torch.__version__) < "2.13":
        return cls
    from torch._library.opaque_object import is_opaque_type, register_opaque_type

    if not is_opaque_type(cls):
        register_opaque_type(cls, typ="value")
    return cls


def _equal(self: Any, other: object) -> bool:
    if type(self) is not type(other):
        return NotImplemented
    return vars(self) == vars(other)


def _hash(self: Any) -> int:
    return hash((type(self), *vars(self).items()))


def _fx_repr(self: Any) -> tuple[str, dict[str, Any]]:
    """Return an expression that creates an equal quantizer, and the objects that it names.

    Raises:
        TypeError: An attribute is not a constant, for example a process group.
    """
    cls = type(self)
    named: dict[str, Any] = {cls.__name__: cls, "restored": restored, "device": torch.device}
    parts: list[str] = []
    for name, value in vars(self).items():
        if not isinstance(value, _CONSTANTS):
            raise TypeError(
                f"{cls.__name__}.{name} is {with_article(type(value))}, which a compiled graph cannot hold as a "
                "constant; use a quantizer whose attributes are numbers, strings and enums"
            )
        text = f"float('{value}')" if type(value) is float else repr(value)
        if isinstance(value, enum.Enum):
            named[type(value).__name__] = type(value)
            text = f"{type(value).__name__}({value.value!r})"
        parts.append(f"{name}={text}")
    return f"restored({cls.__name__}, {', '.join(parts)})", named


def restored(cls: type[Quantizer], **fields: Any) -> Quantizer:
    """Return a quantizer of a class with these attributes; compiled graphs call this function."""
    quantizer = object.__new__(cls)
    vars(quantizer).update(fields)
    return quantizer


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Return whether an object is a quantizer of a class that is registered as a value type."""
    return type(quantizer) in _registered
