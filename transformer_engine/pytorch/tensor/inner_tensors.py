"""Tensors and metadata that the results of a quantizer would have, without values.

Operators of torch return plain tensors: they allocate the inner tensors of a result, and their
callers put them into a quantized tensor. `transformer_engine.pytorch.dynamo.TensorSpec` does both.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_bool, with_article
from ..runtime.checks import extents, values_dtype
from ..runtime.device import canonical_device
from .storage.quantized_tensor_storage import QuantizedTensorStorage

_PLAIN = (bool, int, float, str, enum.Enum, type(None))


class DescribesTensors:
    """Quantizer methods that describe and allocate result tensors, from `empty`."""

    TENSOR: Any
    internal: bool

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> QuantizedTensorStorage:
        raise NotImplementedError

    def inner_tensor_specs(
        self, shape: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{attribute: (shape, dtype)} for the tensors in a result with this shape, in the directions of the usages."""
        tensors = _tensors(self.empty(extents("shape", shape), torch.float32, "meta", False))
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def alloc_tensors(
        self, shape: Sequence[int], *, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """{attribute: uninitialized tensor} of `inner_tensor_specs`, by default on the device of modules."""
        target_device = canonical_device(device)
        return _tensors(self.empty(extents("shape", shape), torch.float32, target_device, False))

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """{"cls", "nontensor_kwargs"}: the storage class of the results, and its keywords except the tensors.

        Args:
            fake_dtype: Nominal dtype of the results.
        """
        values_dtype("fake_dtype", fake_dtype)
        storage = self.empty((128, 128), fake_dtype, "meta", False)
        keywords = storage.constants()
        keywords["fake_dtype"] = keywords.pop("dtype")
        return {"cls": storage.storage_class(), "nontensor_kwargs": keywords}

    def create_metadata(
        self, _shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """Metadata of a result: its class, whether it is a torch.Tensor, and the `storage_metadata` keywords.

        Args:
            dtype: Nominal dtype.
            requires_grad: The result requires a gradient.

        Returns:
            {"cls", "is_tensor", "requires_grad", "nontensor_kwargs"}.
        """
        metadata = self.storage_metadata(dtype)
        is_tensor = not self.internal and self.TENSOR is not None
        return {
            "cls": self.TENSOR if is_tensor else metadata["cls"],
            "is_tensor": is_tensor,
            "requires_grad": to_bool("requires_grad", requires_grad),
            "nontensor_kwargs": metadata["nontensor_kwargs"],
        }

    def _value_fields(self) -> tuple[str, ...]:
        """Attribute names that determine codes and scales."""
        return tuple([name for name in vars(self) if name != "device" and not name.startswith("_")])

    def _value_key(self) -> Hashable:
        """Key that is equal for quantizers with the same class and settings.

        Raises:
            TypeError: An attribute is not a plain value, for example a process group.
        """
        fields = {name: getattr(self, name) for name in self._value_fields()}
        for name, value in fields.items():
            if not isinstance(value, _PLAIN):
                raise TypeError(
                    f"{type(self).__name__}.{name} is {with_article(type(value))}, which is no plain value; use a "
                    "quantizer without it, or compare quantizers with =="
                )
        return (type(self), *fields.items())


def _tensors(storage: QuantizedTensorStorage) -> dict[str, Tensor]:
    tensors = {name: getattr(storage, name) for name in storage.TENSORS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
