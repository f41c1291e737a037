"""FP8 with one scale per tensor: codes [..., K] = saturate(x * scale), with a delayed or a current scale."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.formats import FLOAT8
from ...common.numbers import to_bool
from ..constants import DType
from ..primitives.gemm.cublaslt import reads_all_layouts
from ..primitives.operand import Operand
from ..primitives.quantize import Cast, Quantized, absolute_maximum, quantize, scale_from_amax
from ..primitives.quantize.encodings import row_maxima
from ..primitives.quantize.maximum import maximum
from ..runtime.checks import group_or_none
from ..runtime.device import canonical_device, has_cuda
from . import elements
from .current_scaling import RecordsScale, ReducesMaximum, reduce_maxima
from .delayed_scale import DelayedScale, ScalingState
from .elements import check_scalar, empty_quantized, float8_dtype, float8_number, float8_spec
from .padded_groups import PaddedGroups, maxima_of_groups, scaled_groups
from .quantized_tensor import QuantizedTensor
from .quantizer import Operands, Quantizer, amax_floor
from .storage.float8_tensor_storage import Float8TensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage, matrix_shape, plain_matrix

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
]


def code_directions(rowwise: bool, columnwise: bool) -> tuple[bool, bool]:
    """Directions in which a kernel writes FP8 codes for these product operands."""
    # Without a GPU, no product reads all layouts; `has_cuda` is cached.
    one_copy = (
        columnwise and not torch.compiler.is_compiling() and has_cuda() and reads_all_layouts()
    )
    return (True, False) if one_copy else (rowwise, columnwise)


def _operands(
    quantized: Quantized, dtype: torch.dtype, rowwise: bool = True, columnwise: bool = True
) -> Operands:
    """Operands from codes in the directions of `code_directions`.

    Without transposed codes, the column-wise operand is a view of the row-wise codes.
    """
    codes, scale, codes_t, scale_t, _, _ = quantized
    if codes_t is None and codes is not None and columnwise and reads_all_layouts():
        codes_t, scale_t = codes.t(), scale
    return Operands(
        Operand(codes, scale, FLOAT8, None, dtype) if codes is not None and rowwise else None,
        Operand(codes_t, scale_t, FLOAT8, None, dtype) if codes_t is not None else None,
    )


class Float8Tensor(QuantizedTensor, Float8TensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """FP8 codes with one scale. The other arguments are as in `QuantizedTensor`."""

    STORAGE = Float8TensorStorage

    def _default_quantizer(self) -> Quantizer:
        usages = self.get_usages()
        return Float8CurrentScalingQuantizer(
            self._fp8_dtype, self.device, rowwise=usages["rowwise"], columnwise=usages["columnwise"]
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_float8_tensor_in_reduce_ex, (
            self._data,
            self._fp8_dtype,
            self._scale_inv,
            self.dtype,
            self.shape,
            self._transpose,
        )


class _PerTensorQuantizer(Quantizer):
    """Base class for delayed and current scaling: one FP8 element, one scale."""

    TENSOR = Float8Tensor

    dtype: DType

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> QuantizedTensorStorage:
        spec = float8_spec(self.dtype, self.rowwise_usage, self.columnwise_usage)
        storage = self._packed(empty_quantized(spec, *matrix_shape(shape), device), shape, dtype)
        return storage.mapped(Tensor.pin_memory) if pin_memory else storage

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Float8Tensor | Float8TensorStorage:
        """Return a tensor from uint8 codes [..., K] that were computed elsewhere with this quantizer's scale."""
        if data.dtype not in (torch.uint8, float8_dtype(self.dtype)):
            raise TypeError(
                f"codes are uint8 or {float8_dtype(self.dtype)}, not {data.dtype}; view them as uint8"
            )
        storage = Float8TensorStorage(
            data.view(torch.uint8),
            self._inverse_scale(data.device),
            self.dtype,
            quantizer=self,
            dtype=fake_dtype,
        )
        if self.columnwise_usage:
            storage.update_usage(columnwise_usage=True)
        return (
            storage
            if internal or self.internal
            else self.wrap(storage, requires_grad=requires_grad)
        )

    def _inverse_scale(self, device: torch.device) -> Tensor:
        return torch.empty(1, dtype=torch.float32, device=device)  # the caller writes it

    def _packed(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype
    ) -> Float8TensorStorage:
        return Float8TensorStorage.pack(
            quantized, shape, fp8_dtype=self.dtype, quantizer=self, dtype=dtype
        )

    def groups_unsupported_reason(self) -> str | None:
        supported = type(self) in (Float8Quantizer, Float8CurrentScalingQuantizer)
        return None if supported else f"{type(self).__name__} has its own encode"

    def _group_scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """(maxima, multipliers), float32 [n], for groups with these maxima."""
        raise NotImplementedError

    def encode_groups(self, x: Tensor, groups: PaddedGroups) -> dict[str, Tensor]:
        amax, scale = self._group_scales(
            maxima_of_groups(row_maxima(x), groups, groups.group_of_row())
        )
        usages = (self.rowwise_usage, self.columnwise_usage)
        return {"amax": amax} | scaled_groups(
            x, groups, scale, elements.find_element(self.dtype), *usages
        )

    def adopt(self, quantized: Quantized, dtype: torch.dtype) -> Operands:
        return _operands(quantized, dtype)

    def adopted(self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype) -> Any:
        storage = self._packed(quantized, shape, dtype)
        storage.update_usage(columnwise_usage=self.columnwise_usage or None)
        return storage if self.internal else self.wrap(storage)

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def shard_granularity(self, columnwise: bool) -> int | None:
        return 1 if type(self) in (Float8Quantizer, Float8CurrentScalingQuantizer) else None


class _StateViews(NamedTuple):
    """A state's tensors, and views of one column."""

    all_scales: Tensor
    history: Tensor
    scale: Tensor
    amax: Tensor


class Float8Quantizer(DelayedScale, _PerTensorQuantizer):
    """Quantizer to FP8 with one scale from earlier steps, as in delayed scaling.

    The other arguments are as in `Quantizer` and `Float8BlockQuantizer`.

    Args:
        scale: Scale float32 [1] from earlier steps, or part of a recipe's state (`from_state`).
        amax: Maximum float32 [1], which each cast raises to max|x| until its owner resets it.
    """

    RECIPE = recipes.DelayedScaling
    stateful = True
    amax_reduction_group: torch.distributed.ProcessGroup | None = None

    def __init__(
        self,
        scale: Tensor | None,
        amax: Tensor | None,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        check_scalar("scale", scale)
        check_scalar("amax", amax)
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = float8_number(fp8_dtype)
        self._scale = scale
        self._amax = amax
        self._state: ScalingState | None = None
        self._index = 0
        self._slot: _StateViews | None = None

    @classmethod
    def from_state(
        cls,
        state: ScalingState,
        index: int,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> Float8Quantizer:
        """Return a quantizer for slot `index` of a state, which reads the state's tensors at every use."""
        self = cls(
            scale=None, amax=None, fp8_dtype=fp8_dtype, rowwise=rowwise, columnwise=columnwise
        )
        self._state = state
        self._index = index
        return self

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> Float8TensorStorage:
        spec = float8_spec(self.dtype, rowwise, columnwise)
        scale = self.scale.reshape(1)
        if noop_flag is None and not torch.compiler.is_compiling():
            quantized = quantize(
                plain_matrix(tensor), spec, multiplier=scale, record=self.amax.view(1)
            )
            if self.amax_reduction_group is not None:
                reduce_maxima(self.amax, self.amax_reduction_group)
            return self._packed(quantized, tensor.shape, tensor.dtype)
        quantized = quantize(plain_matrix(tensor), spec, multiplier=scale)
        assert quantized.amax is not None
        self.record(quantized.amax, noop_flag)
        return self._packed(quantized, tensor.shape, tensor.dtype)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        if torch.compiler.is_compiling():
            return super().operands(matrix, rowwise, columnwise)
        scale, amax = self._views()
        spec = float8_spec(self.dtype, *code_directions(rowwise, columnwise))
        quantized = quantize(matrix, spec, multiplier=scale, record=amax)
        if self.amax_reduction_group is not None:
            reduce_maxima(amax, self.amax_reduction_group, matrix)
        return _operands(quantized, matrix.dtype, rowwise, columnwise)

    def cast(self, rowwise: bool, columnwise: bool) -> Cast | None:
        if self.amax_reduction_group is not None:
            return None  # the maximum is reduced over the group after it is recorded
        return Cast(float8_spec(self.dtype, *code_directions(rowwise, columnwise)), *self._views())

    def _views(self) -> tuple[Tensor, Tensor]:
        """Return scale and amax, float32 [1]; views of a state are cached while it has the same tensors."""
        state = self._state
        if state is None:
            # No view of a vector: selective checkpointing counts the operators of a second run, which reads no state.
            scale, amax = self.scale, self.amax
            return scale if scale.ndim == 1 else scale.view(
                1
            ), amax if amax.ndim == 1 else amax.view(1)
        slot = self._slot
        if slot is not None and slot[0] is state.scale_in_place and slot[1] is state.amax_history:
            return slot[2:]
        slot = self._slot = _StateViews(
            state.scale_in_place, state.amax_history, self.scale, self.amax
        )
        return slot[2:]

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        if type(self) is not Float8Quantizer:
            return None
        return (self.dtype, self.amax_reduction_group), self._views()

    def __getstate__(self) -> dict[str, Any]:
        # a process group lives as long as its process
        return self.__dict__ | {"_slot": None, "amax_reduction_group": None}

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> Float8Quantizer:
        if self.amax_reduction_group is group:
            return self
        copied = copy.copy(self)
        copied.amax_reduction_group = group
        return copied

    def sharing_scale(self, group: torch.distributed.ProcessGroup) -> Float8Quantizer:
        """Return a copy whose scale is the least over a group's ranks; it records maxima as this quantizer does."""
        scale = self.scale.clone()
        torch.distributed.all_reduce(scale, torch.distributed.ReduceOp.MIN, group)
        copied = copy.copy(self)
        copied._scale, copied._amax, copied._state, copied._slot = scale, self.amax, None, None
        return copied

    def calibrate(self, tensor: Tensor) -> None:
        self.record(absolute_maximum(tensor))

    def _group_scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        self.record(maxima.amax().reshape(1))
        return maxima, self.scale.reshape(1).to(torch.float32).expand(maxima.shape[0]).contiguous()

    def replay_state(self) -> tuple[Tensor, ...]:
        return (self.scale.clone(),)

    def replaying(self, state: tuple[Tensor, ...]) -> Float8Quantizer:
        (scale,) = state
        return Float8Quantizer(scale, torch.zeros_like(scale), self.dtype)

    def record(self, amax: Tensor, noop_flag: Tensor | None = None) -> None:
        """Raise the recorded maximum to amax [1], unless the device flag is set or amax is on the meta device."""
        if amax.device.type == "meta":
            return
        recorded = self.amax
        largest = torch.maximum(recorded, amax.reshape(recorded.shape))
        # `self.amax` is read again: a compiler must see that writes reach the state through its base tensor.
        self.amax.copy_(
            largest if noop_flag is None else torch.where(noop_flag != 0, recorded, largest)
        )
        if self.amax_reduction_group is not None:
            reduce_maxima(self.amax, self.amax_reduction_group)

    def _inverse_scale(self, device: torch.device) -> Tensor:
        return self.scale.reshape(1).to(device, torch.float32).reciprocal()


class Float8CurrentScalingQuantizer(ReducesMaximum, RecordsScale, _PerTensorQuantizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Quantizer to FP8 with one scale from the maximum of the tensor itself, as in current scaling.

    The other arguments are as in `Float8Quantizer`, `Float8BlockQuantizer` and `NVFP4Quantizer`.

    Args:
        device: Accepted for compatibility; the device of the input counts.
        use_existing_amax: Use the maximum in `amax` instead of the tensor's.
    """

    RECIPE = recipes.Float8CurrentScaling

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        group_or_none("amax_reduction_group", amax_reduction_group)
        for name, value in {
            "use_existing_amax": use_existing_amax,
            "scale": scale,
            "amax": amax,
        }.items():
            if value is not None and value is not False:
                warnings.warn(
                    f"Float8CurrentScalingQuantizer ignores {name}: it scales each tensor by its own maximum",
                    DeprecationWarning,
                    stacklevel=2,
                )
        if device is not None:
            canonical_device(device)
        self.dtype = float8_number(fp8_dtype)
        self.device = device
        self.with_amax_reduction = to_bool("with_amax_reduction", with_amax_reduction)
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = to_bool("force_pow_2_scales", force_pow_2_scales)
        self.amax_epsilon = amax_floor(amax_epsilon)

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> Float8TensorStorage:
        quantized = self._quantized(plain_matrix(tensor), rowwise, columnwise)
        self.record(quantized)
        return self._packed(quantized, tensor.shape, tensor.dtype)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        quantized = self._quantized(matrix, *code_directions(rowwise, columnwise))
        return _operands(quantized, matrix.dtype, rowwise, columnwise)

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        if type(self) is not Float8CurrentScalingQuantizer:
            return None
        group = self.amax_reduction_group if self.with_amax_reduction else None
        return (
            self.dtype,
            self.force_pow_2_scales,
            self.amax_epsilon,
            self.with_amax_reduction,
            group,
        ), ()

    def _quantized(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Quantized:
        spec = float8_spec(
            self.dtype, rowwise, columnwise, self.force_pow_2_scales, self.amax_epsilon
        )
        amax = None
        if self.with_amax_reduction:
            amax = self.reduce_amax(maximum(matrix))
        return quantize(matrix, spec, amax=amax)

    def _group_scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        maxima = self.reduce_amax(maxima) if self.with_amax_reduction else maxima
        scaling = {"power_of_two": self.force_pow_2_scales, "epsilon": self.amax_epsilon}
        return maxima, scale_from_amax(maxima, elements.find_element(self.dtype).maximum, **scaling)

    def cast(self, rowwise: bool, columnwise: bool) -> Cast | None:
        if self.with_amax_reduction:
            return None
        directions = code_directions(rowwise, columnwise)
        return Cast(
            float8_spec(self.dtype, *directions, self.force_pow_2_scales, self.amax_epsilon)
        )

    def _configuration(self) -> Hashable:
        reduction = (self.with_amax_reduction, self.amax_reduction_group)
        return (self.dtype, reduction, self.force_pow_2_scales, self.amax_epsilon)


def _make_float8_tensor_in_reduce_ex(
    data: Tensor | None,
    fp8_dtype: DType,
    fp8_scale_inv: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    data_transpose: Tensor | None = None,
) -> Float8Tensor:
    """Return a Float8Tensor from its pickle; its use determines its quantizer."""
    payload = {"data": data, "fp8_scale_inv": fp8_scale_inv, "fp8_dtype": fp8_dtype}
    return Float8Tensor(shape, dtype, data_transpose=data_transpose, **payload)  # pyright: ignore


PICKLED = (_make_float8_tensor_in_reduce_ex,)
