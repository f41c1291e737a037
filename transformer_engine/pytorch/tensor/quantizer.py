"""Quantizer: codes, scales = quantize(x [..., K]); quantization settings, separate from results."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.checks import described, number
from ...common.numbers import to_bool, to_float, with_article
from ..constants import dist_group_type
from ..primitives.operand import COLUMNWISE, ROWWISE, Operand, plain
from ..primitives.quantize import Cast, Quantized
from ..runtime.autograd import check_transforms
from ..runtime.checks import extents, flag_tensor, tensor, values_dtype
from ..runtime.device import canonical_device
from ..runtime.warn_once import warn_once
from .construction import StraightThroughQuantize
from .custom_operand import contracted
from .inner_tensors import DescribesTensors
from .padded_groups import EncodesGroups
from .storage.identity_tensor_storage import IdentityTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from .quantized_tensor import QuantizedTensor

is_compiling = torch.compiler.is_compiling
is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


class TransposedValues(NamedTuple):
    """Unquantized values [M, K] that a product reads transposed, as a view [K, M]."""

    values: Tensor


class Operands(NamedTuple):
    """Both directions of a matrix [M, K]; None for a direction that was not requested."""

    rowwise: Operand | None
    columnwise: Operand | TransposedValues | None


class Quantizer(EncodesGroups, DescribesTensors):
    """Base class for quantizers. `encode` is the functional core; everything else is defined by it.

    A custom quantizer may define `quantize_impl(tensor)` instead, or `update_quantized` and `make_empty`. Their results
    are tensors of this package, objects with `dequantize()`, or objects that the quantizer's `qgemm` multiplies; see
    `custom_operand`. The attribute `internal` returns bare storages, which are cheaper and invisible to autograd.
    `optimize_for_gemm` states that results are only multiplied: MXFP8 and NVFP4 scales are in matrix-instruction order
    (`_with_gemm_swizzled_scales`). Slices, gathers and copies of such tensors convert the order.

    Args:
        rowwise: Make codes for products along the last dimension; the attribute `rowwise_usage`.
        columnwise: Make codes for products along the other dimensions; the attribute `columnwise_usage`.
    """

    TENSOR: ClassVar[Any] = None  # the tensor class that `wrap` returns; None: bare storages
    # The recipe for whose weights it is made; None: any.
    RECIPE: ClassVar[type[recipes.Recipe] | None] = None
    is_identity = False  # `encode` leaves values unchanged
    stochastic_rounding: bool = False  # `encode` draws random numbers
    stateful: bool = False  # `encode` depends on scales that change between calls
    reads_quantized = False  # `operands` also takes quantized matrices

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage = to_bool("rowwise", rowwise)
        self.columnwise_usage = to_bool("columnwise", columnwise)
        self.internal = False
        self.optimize_for_gemm = False

    @property
    def column_signs(self) -> bool | None:
        """Hadamard transform of the column direction: with (True) or without random signs; None: no transform."""
        return None

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        """Quantize [..., K] in the requested directions; if noop_flag is set, statistics are not recorded."""
        usages = self.rowwise_usage, self.columnwise_usage
        self.set_usage(rowwise=rowwise, columnwise=columnwise)
        try:
            # A custom quantizer: use the public methods that it overrides.
            cls = type(self)
            if cls.quantize_impl is not Quantizer.quantize_impl:
                return self.quantize_impl(tensor)
            if cls.update_quantized is Quantizer.update_quantized:
                raise TypeError(
                    f"{cls.__name__} cannot quantize; define quantize_impl(tensor), or update_quantized and make_empty"
                )
            empty = self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            filled = self.update_quantized(tensor, empty, noop_flag=noop_flag)
            return empty if filled is None else filled
        finally:
            self.set_usage(rowwise=usages[0], columnwise=usages[1])

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Return a tensor quantized in the directions of the usages, without autograd."""
        return self._quantize(tensor, None)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        """Quantize a matrix [M, K] to operands: [M, K] row-wise and [K, M] column-wise, where requested.

        Codes and scales equal `encode`'s, without a storage.
        """
        storage = self.encode(matrix, rowwise, columnwise)
        if not isinstance(storage, QuantizedTensorStorage):
            return Operands(
                contracted(storage, ROWWISE, self) if rowwise else None,
                contracted(storage, COLUMNWISE, self) if columnwise else None,
            )
        return Operands(
            storage.contract(ROWWISE) if rowwise else None,
            storage.contract(COLUMNWISE) if columnwise else None,
        )

    def cast(self, rowwise: bool, columnwise: bool) -> Cast | None:
        """Return the cast by which the kernel that computes a matrix quantizes it; None if unsupported."""
        return None

    def adopt(self, quantized: Quantized, dtype: torch.dtype) -> Operands:
        """Return the operands from codes that `cast` computed, for values in dtype."""
        raise TypeError(f"{type(self).__name__} cannot run inside another kernel")

    def adopted(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype
    ) -> QuantizedTensor | QuantizedTensorStorage:
        """Return the tensor with these codes, this shape and nominal dtype."""
        raise TypeError(f"{type(self).__name__} cannot run inside another kernel")

    def wrap(self, storage: QuantizedTensorStorage, *, requires_grad: bool = False) -> Any:
        """Return the tensor that shares a storage's payload for autograd; without TENSOR the storage itself."""
        if self.TENSOR is None:
            return storage
        return self.TENSOR.from_storage(storage, requires_grad=requires_grad)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> QuantizedTensorStorage:
        """Return an uninitialized storage for values with this shape, in this quantizer's directions."""
        if type(self).make_empty is Quantizer.make_empty:
            raise TypeError(
                f"{type(self).__name__} makes no empty tensors; define make_empty(shape, ..)"
            )
        return self.make_empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)

    def _configuration(self) -> Hashable:
        """Return the settings that determine equality besides usages and flags; by default the identity."""
        return id(self)

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor | QuantizedTensorStorage:
        """Return the quantized tensor; the gradient passes through the quantization.

        Args:
            tensor: Values [..., K], floating point.
            out: Quantized tensor to write to, in the directions that it has.
            dtype: Nominal dtype, by default as for tensor.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        _check_source("tensor", tensor)
        if dtype is not None:
            values_dtype("dtype", dtype)
        if tensor.requires_grad and not self.internal and is_grad_enabled():
            return StraightThroughQuantize.apply(tensor, self, dtype)
        check_transforms(StraightThroughQuantize.OPERATION, tensor)
        return self._quantize(tensor, dtype)

    def _quantize(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        if is_compiling():
            with torch.no_grad():
                return self._wrap_values(tensor.detach(), dtype)
        grad = is_grad_enabled()
        if not grad:
            return self._wrap_values(
                tensor.detach() if tensor.requires_grad or self.is_identity else tensor, dtype
            )
        # torch.no_grad() as a context takes as long as a kernel launch.
        set_grad_enabled(False)
        try:
            return self._wrap_values(
                tensor.detach() if tensor.requires_grad or self.is_identity else tensor, dtype
            )
        finally:
            set_grad_enabled(True)

    def _wrap_values(self, values: Tensor, dtype: torch.dtype | None) -> Any:
        """Return the tensor, or bare storage, for values without a gradient."""
        storage = self.encode(values, self.rowwise_usage, self.columnwise_usage)
        if dtype is not None:
            storage._dtype = dtype
        return storage if self.internal else self.wrap(storage)

    def __call__(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor | QuantizedTensorStorage:
        return self.quantize(tensor, out=out, dtype=dtype)

    def multi_quantize(
        self, list_of_tensors: Sequence[Tensor]
    ) -> list[QuantizedTensor | QuantizedTensorStorage]:
        """Quantize each tensor in a list with this quantizer, in order."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def is_requantization_safe(self) -> bool:
        """Return whether quantizing the same values again later gives the same codes and scales.

        False if the result depends on state that changes between calls, as with delayed scaling, or
        on random numbers, as with stochastic rounding. A quantizer from another library is assumed
        to be safe unless it overrides this method.
        """
        return not (self.stateful or self.stochastic_rounding)

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> Any:
        """Quantize src into dst's buffers, in the directions dst has; a set device flag leaves dst unchanged."""
        if not isinstance(dst, QuantizedTensorStorage):
            raise TypeError(
                f"out={described(dst)} is {with_article(type(dst))}; give a tensor made by "
                f"{type(self).__name__}.make_empty"
            )
        _check_source("src", src)
        flag_tensor("noop_flag", noop_flag)
        if src.shape != dst.shape:
            raise ValueError(
                f"cannot quantize a tensor of shape {tuple(src.shape)} into one of shape {tuple(dst.shape)}; "
                "reshape the source or make another destination"
            )
        usages = dst.get_usages()
        with torch.no_grad():
            encoded = self.encode(
                src.detach(), usages["rowwise"], usages["columnwise"], noop_flag=noop_flag
            )
            dst.copy_from_storage(encoded, noop_flag=noop_flag)
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Return an uninitialized quantized tensor, by default on the device of modules; see `update_quantized`."""
        shape = extents("shape", shape)
        values_dtype("dtype", dtype)
        requires_grad = to_bool("requires_grad", requires_grad)
        pin_memory = to_bool("pin_memory", pin_memory)
        # Only host memory is pinned.
        target_device = canonical_device("cpu" if device is None and pin_memory else device)
        storage = self.empty(shape, dtype, target_device, pin_memory)
        return storage if self.internal else self.wrap(storage, requires_grad=requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Select the directions for later quantizations; None leaves a direction unchanged."""
        rows = self.rowwise_usage if rowwise is None else to_bool("rowwise", rowwise)
        columns = self.columnwise_usage if columnwise is None else to_bool("columnwise", columnwise)
        self.rowwise_usage, self.columnwise_usage = rows, columns

    def get_usages(self) -> dict[str, bool]:
        """Return the directions for later quantizations: {"rowwise": bool, "columnwise": bool}."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """Return a quantizer with independent usages that shares scaling state, if any."""
        return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        """Copy scaling state but not the process group, which exists once per process."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if not isinstance(value, dist_group_type):
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def calibrate(self, tensor: Tensor) -> None:
        """Record statistics of a tensor without quantizing it; most formats have none."""

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return whether the format supports a tensor with this shape."""
        return (
            self.unsupported_shape_reason(inp.shape, self.rowwise_usage, self.columnwise_usage)
            is None
        )

    def unsupported_shape_reason(
        self, shape: Sequence[int], rowwise: bool, columnwise: bool
    ) -> str | None:
        """Return the reason why the format does not support a shape in these directions, or None."""
        return None

    def compile_key(self) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """Cache key of compiled passes: the settings on which `operands` and `cast` depend, and their state tensors.

        None if the settings are unknown, as for a custom quantizer: such passes are not compiled.
        """
        return None

    def replay_state(self) -> tuple[Tensor, ...]:
        """Return copies of the tensors that `encode` depends on besides its input, for recomputation."""
        return ()

    def replaying(self, state: tuple[Tensor, ...]) -> Quantizer:
        """Return a quantizer that repeats `encode` with the state from `replay_state`, and records nothing."""
        return self

    def _get_compatible_recipe(self) -> type[recipes.Recipe] | None:
        """Return the recipe class for whose weights this quantizer is made; None: any."""
        return self.RECIPE

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> Quantizer:
        """Return the quantizer for a shard whose tensor is sharded over a group: one tensor has one scale."""
        return self

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether a gather along rows needs row-wise data, because column-wise data cannot be concatenated."""
        return False

    def shard_granularity(self, columnwise: bool) -> int | None:
        """Return the row multiple at which joining the shards' codes along rows gives the whole matrix's codes.

        One scale per tensor must then be shared by all shards; see `with_reduction_group`. With
        `columnwise` the column direction is joined too. None if codes cannot be joined.
        """
        return None

    def can_join_shards(self, kind: type) -> bool:
        """Return whether codes from a caller's shards of this class join like this quantizer's."""
        return False

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        ours, theirs = [
            (
                q.rowwise_usage,  # pyright: ignore[reportAttributeAccessIssue]
                q.columnwise_usage,  # pyright: ignore[reportAttributeAccessIssue]
                q.internal,  # pyright: ignore[reportAttributeAccessIssue]
                q.optimize_for_gemm,  # pyright: ignore[reportAttributeAccessIssue]
                q._configuration(),  # pyright: ignore[reportAttributeAccessIssue]
            )
            for q in (self, other)
        ]
        return ours == theirs

    def __hash__(self) -> int:
        return hash((type(self), self._configuration()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def _check_source(name: str, values: Any) -> None:
    """Raise TypeError unless these values can be quantized, or are quantized."""
    if isinstance(values, QuantizedTensorStorage):
        return
    tensor(name, values)
    if not values.is_floating_point():
        raise TypeError(
            f"{name}: cannot quantize {values.dtype}; convert to a floating-point dtype first"
        )


def amax_floor(amax_epsilon: Any) -> float:
    """Convert the lower bound for a quantizer's absolute maximum; a negative bound has no effect."""
    floor = to_float("amax_epsilon", amax_epsilon)
    number("amax_epsilon", floor)
    if floor < 0:
        warn_once(
            "amax_epsilon",
            f"amax_epsilon={floor} has no effect, because an absolute maximum is at least 0; use 0.0",
            stacklevel=4,
        )
    return max(floor, 0.0)


class Calibrating(Quantizer):
    """Records the statistics of a quantizer for each tensor, and leaves the tensor in high precision."""

    def __init__(self, quantizer: Quantizer):
        super().__init__(rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage)
        self.quantizer = quantizer

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> IdentityTensorStorage:
        self.quantizer.calibrate(tensor)
        return IdentityTensorStorage(hp_data=tensor)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        self.quantizer.calibrate(matrix)
        return Operands(plain(matrix), TransposedValues(matrix))

    def is_requantization_safe(self) -> bool:
        return False  # a second call would record a second tensor

    def wrap(self, storage: QuantizedTensorStorage, *, requires_grad: bool = False) -> Tensor:
        return storage.decode(storage.dtype)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> IdentityTensorStorage:
        values = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return IdentityTensorStorage(hp_data=values)

    def _configuration(self) -> Hashable:
        return self.quantizer
