"""TensorSpec: description of a plain or quantized tensor, from which an operator allocates its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.checks import extents, values_dtype
from ..runtime.device import canonical_device
from ..tensor.quantized_tensor import QuantizedTensorStorage, get_storage
from ..tensor.quantizer import Quantizer

__all__ = ["TensorSpec", "to_tensor_spec"]

_PLAIN = "data"  # name of the inner tensor of a plain tensor


class TensorSpec:
    """Description of a plain or quantized tensor, from which an operator allocates its results.

    A torch operator returns plain tensors. `create_inner_tensors` allocates the inner tensors of a quantized
    tensor, also in the fake implementation of the operator, and `assemble` builds the quantized tensor from them.

    Args:
        shape: Tensor shape.
        dtype: Value dtype; nominal if the tensor is quantized.
        quantizer: Quantizer of the tensor, which is copied; None for a plain tensor.
        requires_grad: The tensor requires a gradient.
        device: Device, by default the modules'.

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

    def update_usage(
        self,
        rowwise_usage: bool | None = None,
        columnwise_usage: bool | None = None,
        *,
        rowwise: bool | None = None,
        columnwise: bool | None = None,
    ) -> None:
        """Select the directions of the quantized tensor; None leaves a direction unchanged.

        Args:
            rowwise_usage: Row-wise codes.
            columnwise_usage: Column-wise codes.
            rowwise: Alias for rowwise_usage, as in `Quantizer.set_usage`.
            columnwise: Alias for columnwise_usage.

        Raises:
            ValueError: The tensor is plain.
        """
        if self.quantizer is None:
            raise ValueError(
                "this TensorSpec describes a plain tensor, which has no directions; give it a quantizer"
            )
        self.quantizer.set_usage(
            rowwise=rowwise_usage if rowwise is None else rowwise,
            columnwise=columnwise_usage if columnwise is None else columnwise,
        )

    def inner_names(self) -> tuple[str, ...]:
        """Inner tensor names, in order."""
        if self.quantizer is None:
            return (_PLAIN,)
        storage = self._storage("meta")
        return tuple([name for name in storage.TENSORS if getattr(storage, name) is not None])

    def create_metadata(self) -> dict[str, Any]:
        """Everything but the inner tensors, as `Quantizer.create_metadata` returns it; empty for a plain tensor."""
        if self.quantizer is None:
            return {}
        return self.quantizer.create_metadata(
            self.shape, dtype=self.dtype, requires_grad=self.requires_grad
        )

    def create_inner_tensors(self) -> list[Tensor]:
        """Return new uninitialized inner tensors, ordered like `inner_names`."""
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=self.device)]
        tensors, _ = self._storage(self.device).flatten()
        return [tensor for tensor in tensors if tensor is not None]

    def assemble(self, inner_tensors: Sequence[Tensor]) -> Any:
        """Return the tensor that consists of inner tensors.

        Raises:
            ValueError: Their number differs from `inner_names`.
        """
        names = self.inner_names()
        if len(inner_tensors) != len(names):
            raise ValueError(
                f"got {len(inner_tensors)} inner tensors for {list(names)}; give one of each name"
            )
        if self.quantizer is None:
            return inner_tensors[0].requires_grad_(self.requires_grad)
        storage = self._storage("meta")
        remaining = iter(inner_tensors)
        tensors = [
            None if getattr(storage, name) is None else next(remaining) for name in storage.TENSORS
        ]
        _, rebuild = storage.flatten()
        rebuilt = rebuild(tensors)
        return (
            rebuilt
            if self.quantizer.internal
            else self.quantizer.wrap(rebuilt, requires_grad=self.requires_grad)
        )

    def create_tensor(self) -> Any:
        """Return a new uninitialized tensor."""
        return self.assemble(self.create_inner_tensors())

    def _storage(self, device: torch.device | str) -> QuantizedTensorStorage:
        assert self.quantizer is not None
        return self.quantizer.empty(self.shape, self.dtype, torch.device(device), False)


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """Describe a tensor or a quantized storage.

    Raises:
        TypeError: The argument is neither.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        storage = get_storage(tensor)  # pyright: ignore[reportArgumentType]
        quantizer: Any = tensor.writer().copy()
        quantizer.set_usage(**storage.get_usages())
        quantizer.internal = not isinstance(tensor, Tensor)
        requires_grad = isinstance(tensor, Tensor) and tensor.requires_grad
        return TensorSpec(storage.shape, storage.dtype, quantizer, requires_grad, storage.device)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{tensor!r} is not a tensor; give a torch.Tensor or a quantized tensor")
    return TensorSpec(tensor.shape, tensor.dtype, None, tensor.requires_grad, tensor.device)
