"""QuantizedTensor: a torch.Tensor with values [..., K] whose bytes are codes and scales.

The wrapper presents the nominal shape and dtype; `aten` defines its operations.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..runtime.checks import values_dtype
from ..runtime.device import canonical_device
from . import aten, initial_values
from .checkpoint_reads import READ_TARGET_ATTR
from .construction import (
    StraightThroughDequantize,
    check_keywords,
    check_shape,
    nominal_strides,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from .elements import nominal_dtype
from .row_writes import STALE_COLUMNS_ATTR, update_columns
from .storage.fsdp import (
    DerivedTensors,
    GatheredPayload,
    ShardedBuffers,
    join_payload,
    list_derived,
    rewrite_codes,
    sent_shard,
    write_gathered,
)
from .storage.quantized_tensor_storage import QuantizedTensorStorage, Writer

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "get_storage",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]


def _rebuild_trained(
    make: Any, arguments: tuple[Any, ...], requires_grad: bool, is_parameter: bool
) -> QuantizedTensor:
    """Return make(*arguments) as a parameter, or with requires_grad, as it was pickled."""
    tensor = make(*arguments)
    if is_parameter:
        tensor._is_param = True  # how torch marks parameters with other tensor classes
    return tensor.requires_grad_(requires_grad)


def get_storage(tensor: QuantizedTensor) -> QuantizedTensorStorage:
    """Return the shared payload of a tensor or storage; torch.compile would not trace a tensor method."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    cls = type(tensor)
    tensors = {keyword: getattr(tensor, name) for name, keyword in cls.TENSORS.items()}
    constants = {keyword: getattr(tensor, name) for name, keyword in cls.CONSTANTS.items()}
    return cls.STORAGE(**tensors, **constants)


class QuantizedTensor(torch.Tensor, ShardedBuffers, QuantizedTensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """A tensor subclass with a nominal shape and dtype and a quantized payload, which a storage class defines.

    Args:
        shape: Nominal shape.
        dtype: Nominal dtype.
        parts: The payload by position, in the order of the storage class.
        requires_grad: Record operations for autograd.
        device: Payload device, by default as its first tensor.
        fake_dtype: Alias for dtype.
        stride: Nominal strides; contiguous by default.
        storage_offset: Nominal offset of the first element.
        payload: The arguments of the storage class.
    """

    STORAGE: ClassVar[type[QuantizedTensorStorage]]

    def __new__(
        cls,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *parts: Any,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        fake_dtype: torch.dtype | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        **payload: Any,
    ) -> QuantizedTensor:
        """Wrap a payload that was made elsewhere.

        Args:
            shape: Value shape; None means the payload's.
            dtype: Nominal dtype; float32 by default.
            requires_grad: As for `torch.Tensor`.
            device: Checked only; the tensor is on the device of its payload.
            fake_dtype: The nominal dtype under NVIDIA's keyword.
            stride: Nominal strides; contiguous by default. The payload has its own layout.
            storage_offset: Nominal storage offset.
            payload: Storage class keywords, such as `data` and `fp8_scale_inv`.
        """
        check_keywords(cls, (shape, dtype, *parts))
        dtype = nominal_dtype(fake_dtype, dtype) or torch.float32
        if device is not None:
            # the payload determines the device; an invalid device raises an error
            canonical_device(device)
        values_dtype("dtype", dtype)
        storage = cls.STORAGE(**payload, dtype=dtype)  # pyright: ignore[reportCallIssue]
        check_shape(shape, storage.shape)
        return cls.from_storage(
            storage,
            shape=shape,
            requires_grad=requires_grad,
            stride=stride,
            storage_offset=storage_offset,
        )

    def __init__(
        self, *args: Any, **kwargs: Any
    ) -> None:  # the storage's constructor must not run again
        pass

    @classmethod
    def from_storage(
        cls,
        storage: QuantizedTensorStorage,
        *,
        shape: Sequence[int] | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
    ) -> Any:
        """Wrap a storage's payload without copying it; see the constructor for the arguments."""
        shape = storage.shape if shape is None else torch.Size(shape)
        strides = nominal_strides(stride, shape)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=storage_offset,
            dtype=storage.dtype,
            device=storage.device,
            requires_grad=requires_grad,
        )
        for name in (*cls.TENSORS, *cls.CONSTANTS):
            setattr(self, name, getattr(storage, name))
        return self

    @classmethod
    def storage_class(cls) -> type[QuantizedTensorStorage]:
        return cls.STORAGE

    def as_storage(self) -> QuantizedTensorStorage:
        """Return the shared payload without the tensor; in compiled code call `get_storage`."""
        return get_storage(self)

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **payload: Any,
    ) -> QuantizedTensor:
        """Return a tensor that shares another's payload, except for the given keywords."""
        metadata = tensor.get_metadata() | payload
        nominal = metadata.pop("dtype") if dtype is None else dtype
        metadata.pop("dtype", None)
        return cls(
            tensor.shape if shape is None else shape,
            nominal,
            requires_grad=requires_grad,
            **metadata,
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor; the gradient passes through."""
        if dtype is None:
            dtype = self.dtype
        else:
            values_dtype("dtype", dtype)
        if torch.is_grad_enabled() and self.requires_grad:
            return StraightThroughDequantize.apply(self, dtype)
        return self.decode(dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Quantize a tensor into this one's payload."""
        QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)
        return self

    def update_quantizer(self, quantizer: Writer) -> None:
        """Write later values of this tensor with another quantizer; the present codes and scales stay.

        A UserWarning announces the change, as the scales of later values follow from other state.

        Raises:
            RuntimeError: The tensor has no quantizer to be replaced.
        """
        if self._quantizer is None:
            raise RuntimeError(
                f"this {type(self).__name__} has no quantizer to be updated; give one to its constructor"
            )
        if self._quantizer is not quantizer:
            warnings.warn(
                "Quantizer is being updated, this may affect model behavior",
                UserWarning,
                stacklevel=2,
            )
            self._quantizer = quantizer

    def float(self) -> Tensor:
        return self.dequantize(dtype=torch.float32)

    def half(self) -> Tensor:
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> Tensor:
        return self.dequantize(dtype=torch.bfloat16)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Return the quantized tensor on the CPU, as `to` and `cuda` move it."""
        return self.to("cpu", memory_format=memory_format)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return this tensor if its nominal strides are contiguous, otherwise a copy with contiguous strides."""
        if memory_format not in (torch.contiguous_format, torch.preserve_format):
            raise ValueError(
                f"{with_article(type(self))} has no layout {memory_format}; dequantize it first"
            )
        return self if self.is_contiguous() else self.clone()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage: the bytes belong to the payload's tensors."""
        return torch.UntypedStorage(0, device=self.device)

    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, value: Tensor) -> None:
        """Adopt value's payload (shape and nominal dtype included), or quantize a tensor into this one's payload.

        A tensor in another format is dequantized first. A tensor with another shape gets a new payload.
        """
        if isinstance(value, QuantizedTensor) and not isinstance(value, type(self)):
            value = value.dequantize()
        if isinstance(value, type(self)):
            aten.replace_contents(self, value)
        elif value.shape == self.shape:
            self.quantize_(value.detach())
        else:
            writer = self.writer().copy()
            writer.set_usage(**self.get_usages())
            writer.internal = False
            aten.replace_contents(self, writer.quantize(value.detach()))

    data = property(_get_data, _set_data)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write values at an index; if it splits blocks, write the dequantized tensor, and quantize it again."""
        with torch.no_grad():
            quantized = isinstance(self[index], QuantizedTensor)
        if quantized:
            super().__setitem__(index, value)
            return
        # In float32: values in the nominal dtype would be rounded before they are quantized again.
        values = self.dequantize(dtype=torch.float32)
        # `float` is exact; assignments by index lists need equal dtypes.
        values[index] = value.float() if isinstance(value, Tensor) else value
        self.copy_(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        usages = ", ".join(name for name, present in self.get_usages().items() if present)
        values = self.decode(self.dtype) if self.device.type != "meta" else "..."
        return f"{type(self).__name__}(usages=[{usages}], dtype={self.dtype}, data={values})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        payload = {
            name: copy.deepcopy(getattr(self, name), memo)
            for name in (*self.TENSORS, *self.CONSTANTS)
        }
        twin = aten.wrap_storage(
            self, QuantizedTensorStorage.flatten(self)[1]([payload[name] for name in self.TENSORS])
        )
        memo[id(self)] = twin
        for name in self.CONSTANTS:
            setattr(twin, name, payload[name])
        for name, value in aten.user_attributes(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        if isinstance(self, torch.nn.Parameter):
            twin._is_param = True  # how torch marks parameters with other tensor classes
        twin.requires_grad_(self.requires_grad)
        return twin

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        """Return (function, arguments) that create this tensor from its pickle, without gradient or attributes."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how it is made from its pickle"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = self._rebuilding()
        is_parameter = isinstance(self, torch.nn.Parameter)
        if self.requires_grad or is_parameter:
            arguments = _rebuild_trained, (*arguments, self.requires_grad, is_parameter)
        state = initial_values.pickle_attributes(aten.user_attributes(self))
        state = {name: value for name, value in state.items() if name != DerivedTensors.NAME}
        return (*arguments, state) if state else arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes that users set before the tensor was pickled."""
        initial_values.restore(self, state)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = [name for name in self.TENSORS if getattr(self, name) is not None]
        return names, {name: getattr(self, name) for name in self.CONSTANTS} | {"class": type(self)}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        metadata: dict[str, Any],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> QuantizedTensor:
        cls = metadata["class"]
        tensors = {keyword: inner.get(name) for name, keyword in cls.TENSORS.items()}
        constants = {keyword: metadata[name] for name, keyword in cls.CONSTANTS.items()}
        return cls.from_storage(cls.STORAGE(**tensors, **constants), shape=outer_size)

    @classmethod
    def __metadata_guard__(cls, expected: dict[str, Any], found: dict[str, Any]) -> bool:
        """Return whether code compiled for one tensor is valid for another.

        Quantizers are not compared: they have their own guards.
        """
        return all(expected[name] == found[name] for name in expected if name != "_quantizer")

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatheredPayload]:
        """Return the bytes to gather along dimension 0, and the metadata to read them again.

        From now on the shard is quantized with the whole tensor's scale, so that its bytes match other shards.
        """
        if mesh is not None and mesh.size() > 1:
            self._quantizer = self.writer().with_reduction_group(mesh.get_group(mesh.ndim - 1))
        return sent_shard(self, orig_size, None if mesh is None else mesh.size())

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatheredPayload,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return (whole tensor, its inner tensors) from the gathered bytes, or None if out is filled.

        `out` keeps its tensors, and the directions that derive from gathered bytes: operands that a forward pass saved
        are views of them.
        """
        if out is None:
            storage = join_payload(all_gather_outputs, metadata, param_dtype)
            derived = list_derived(storage, all_gather_outputs)
            full = type(self).from_storage(storage)
            setattr(full, DerivedTensors.NAME, derived)
            return full, derived
        assert isinstance(out, QuantizedTensor)
        columnwise = metadata.columnwise or (self.transposable and out.get_usages()["columnwise"])
        rewrites = columnwise and "codes" in metadata.fields and out.rewrites_columns()
        if rewrites and rewrite_codes(out, all_gather_outputs, metadata):
            return None
        storage = join_payload(
            all_gather_outputs, metadata, param_dtype, columnwise and not rewrites
        )
        write_gathered(out, storage, list_derived(storage, all_gather_outputs), rewrites)
        return None

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return an alias for torch.distributed.checkpoint, which saves it, or reads shards into parts of it."""
        alias = self.detach()
        setattr(alias, READ_TARGET_ATTR, self)
        return alias

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Create or drop directions in place; None leaves a direction unchanged."""
        if STALE_COLUMNS_ATTR in vars(self) and (columnwise_usage or rowwise_usage is False):
            update_columns(self)
        derived = vars(self).get(DerivedTensors.NAME)
        before = None if derived is None else QuantizedTensorStorage._tensors_by_name(self)
        QuantizedTensorStorage.update_usage(self, rowwise_usage, columnwise_usage)
        if derived is not None and before is not None:
            derived.follow(before, QuantizedTensorStorage._tensors_by_name(self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return aten.dispatch(func, args, kwargs or {})


# fully_shard reads this signature before each gather, which takes longer than the call if it is not stored.
vars(QuantizedTensor.fsdp_pre_all_gather)["__signature__"] = inspect.signature(
    QuantizedTensor.fsdp_pre_all_gather
)
