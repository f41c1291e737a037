"""Quantizers and quantized tensors in operators of your own under torch.compile.

`register_value_opaque_quantizer(cls)` registers a class of quantizers as an opaque value type of torch. An operator
of `torch.library.custom_op` may then take such a quantizer as an argument, and a compiled graph holds it as a constant.
This needs torch 2.13: older versions have no such types, or restrict them to classes with torch's own metaclass. No
class is registered by default: torch does not trace methods of a registered class, so that operations which copy such a
quantizer (`te.ops.Quantize`) do not compile. Register a subclass.

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
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..common.numbers import with_article
from .runtime.checks import extents, values_dtype
from .runtime.device import canonical_device
from .tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from .tensor.quantizer import Quantizer

__all__ = ["TensorSpec", "is_value_opaque_quantizer", "register_value_opaque_quantizer", "to_tensor_spec"]

_LITERALS = (bool, int, float, str, enum.Enum)
_CONSTANTS = (*_LITERALS, torch.device, type(None))
_PLAIN = "data"  # name of the inner tensor of a plain tensor
_registered: set[type[Quantizer]] = set()
Kind = TypeVar("Kind", bound=type[Quantizer])


def register_value_opaque_quantizer(cls: Kind) -> Kind:
    """Register a class of quantizers as an opaque value type of torch; also a decorator of the class.

    Quantizers of the class are equal if their attributes are. A compiled graph holds a quantizer as a constant and is
    compiled again for an unequal one.

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
    except NameError:  # an annotation names a local class; the graph checks the values of the attributes
        hints = {}
    for name, kind in hints.items():
        held = typing.get_args(kind) or (kind,)
        if typing.get_origin(kind) is ClassVar or kind is ClassVar:
            continue
        if not all(isinstance(part, type) and issubclass(part, (*_LITERALS, type(None))) for part in held):
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
    """Return a quantizer of a class with these attributes, which the code of compiled graphs calls."""
    quantizer = object.__new__(cls)
    vars(quantizer).update(fields)
    return quantizer


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Return whether an object is a quantizer of a class that is registered as a value type."""
    return type(quantizer) in _registered


class TensorSpec:
    """The description of a plain or quantized tensor, from which an operator allocates its results.

    An operator of torch returns plain tensors. `create_inner_tensors` allocates those of a quantized tensor, also in
    the fake implementation of the operator, and `assemble` makes the tensor of them.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the values; nominal if the tensor is quantized.
        quantizer: Quantizer of the tensor, which is copied; None for a plain tensor.
        requires_grad: The tensor requires a gradient.
        device: Device, by default that of modules.

    Raises:
        TypeError: The quantizer is not a `Quantizer`, or the dtype is not a floating-point dtype.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise TypeError(
                f"quantizer={quantizer!r} is not a Quantizer; give one, or None for a plain tensor"
            )
        values_dtype("dtype", dtype)
        self.shape = torch.Size(extents("shape", shape))
        self.dtype = dtype
        self.quantizer = None if quantizer is None else quantizer.copy()
        self.requires_grad = bool(requires_grad)
        self.device = canonical_device(device)

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor is quantized."""
        return self.quantizer is not None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Select the directions of the quantized tensor; None leaves a direction unchanged.

        Raises:
            ValueError: The tensor is plain.
        """
        if self.quantizer is None:
            raise ValueError(
                "this TensorSpec describes a plain tensor, which has no directions; give it a quantizer"
            )
        self.quantizer.set_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)

    @property
    def inner_names(self) -> tuple[str, ...]:
        """Names of the inner tensors, in order."""
        if self.quantizer is None:
            return (_PLAIN,)
        storage = self._storage("meta")
        return tuple([name for name in storage.TENSORS if getattr(storage, name) is not None])

    def create_metadata(self) -> dict[str, Any]:
        """Return everything but the inner tensors: the keywords of the storage; empty for a plain tensor."""
        return {} if self.quantizer is None else self._storage("meta").constants()

    def create_inner_tensors(self) -> list[Tensor]:
        """Return new uninitialized inner tensors, in the order of `inner_names`."""
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        tensors, _ = self._storage(self.device).flatten()
        return [tensor for tensor in tensors if tensor is not None]

    def assemble(self, inner_tensors: Sequence[Tensor]) -> Any:
        """Return the tensor that consists of inner tensors.

        Raises:
            ValueError: Their number is not that of `inner_names`.
        """
        names = self.inner_names
        if len(inner_tensors) != len(names):
            raise ValueError(
                f"got {len(inner_tensors)} inner tensors for {list(names)}; give one of each name"
            )
        if self.quantizer is None:
            return inner_tensors[0].requires_grad_(self.requires_grad)
        storage = self._storage("meta")
        given = iter(inner_tensors)
        tensors = [None if getattr(storage, name) is None else next(given) for name in storage.TENSORS]
        _, rebuild = storage.flatten()
        made = rebuild(tensors)
        return (
            made if self.quantizer.internal else self.quantizer.wrap(made, requires_grad=self.requires_grad)
        )

    def create_tensor(self) -> Any:
        """Return a new uninitialized tensor."""
        return self.assemble(self.create_inner_tensors())

    def _storage(self, device: torch.device | str) -> QuantizedTensorStorage:
        assert self.quantizer is not None
        return self.quantizer.empty(self.shape, self.dtype, torch.device(device), False)


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """Return the description of a tensor or of a quantized storage.

    Raises:
        TypeError: The argument is neither.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        storage = storage_of(tensor)  # pyright: ignore[reportArgumentType]
        quantizer: Any = tensor.writer().copy()
        quantizer.set_usage(**storage.get_usages())
        quantizer.internal = not isinstance(tensor, Tensor)
        requires_grad = isinstance(tensor, Tensor) and tensor.requires_grad
        return TensorSpec(storage.shape, storage.dtype, quantizer, requires_grad, storage.device)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{tensor!r} is not a tensor; give a torch.Tensor or a quantized tensor")
    return TensorSpec(tensor.shape, tensor.dtype, None, tensor.requires_grad, tensor.device)
