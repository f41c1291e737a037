"""DebugQuantizer: the quantizer for one tensor in a debugged layer, which lets features read and replace the tensor.

A layer has three products. Each operand is read in two directions, row-wise and column-wise, by two products:

| tensor | row-wise | column-wise |
| --- | --- | --- |
| activation | fprop | wgrad |
| weight | fprop | dgrad |
| gradient | dgrad | wgrad |

The plan of a tensor says for each direction whether the layer's own quantizer makes the operand, whether the values
stay in high precision, or whether a feature makes it. The results of the products (output, dgrad, wgrad) have one
direction, by which `process_gemm_output` passes them to features.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pytorch.functions.scale_update import is_backward_pass
from ...pytorch.primitives.operand import COLUMNWISE, ROWWISE, plain
from ...pytorch.tensor.custom_operand import contracted
from ...pytorch.tensor.identity_tensor import IdentityQuantizer
from ...pytorch.tensor.observing import Observing
from ...pytorch.tensor.quantized_tensor import get_storage
from ...pytorch.tensor.quantizer import Operands, Quantizer, TransposedValues
from ...pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from ...pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage
from ...pytorch.tensor.storage.quantized_tensor_storage import (
    QuantizedTensorStorage,
    plain_matrix,
    plain_values,
)
from .debug_state import TEDebugState

__all__ = [
    "API_CALL_MODIFY",
    "HIGH_PRECISION",
    "STANDARD_QUANTIZE",
    "DebugQuantizedTensor",
    "DebugQuantizer",
]

STANDARD_QUANTIZE = "Quantize"
HIGH_PRECISION = "High Precision"
API_CALL_MODIFY = "modify_tensor()"

# The products that read a tensor row-wise and column-wise; a result of a product has no second one.
GEMMS: dict[str, tuple[str, str | None]] = {
    "activation": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
    "output": ("fprop", None),
    "dgrad": ("dgrad", None),
    "wgrad": ("wgrad", None),
}
_OF_FORWARD = ("activation", "weight", "output")


class TensorPlan(NamedTuple):
    """How a tensor is computed in a step: the plan of each direction, and whether features inspect the tensor.

    Attributes:
        rowwise: Plan of the row-wise direction.
        columnwise: Plan of the column-wise direction, or None without one.
        inspects: Whether features inspect the tensor.
    """

    rowwise: str = STANDARD_QUANTIZE
    columnwise: str | None = STANDARD_QUANTIZE
    inspects: bool = False


class Location(NamedTuple):
    """A tensor of a layer, and the tensor-parallel group over which the layer is sharded.

    Attributes:
        layer_name: Name of the layer, as debug features select it.
        tensor_name: Name of the tensor in the layer, such as "activation".
        tp_group: Tensor-parallel process group.
        tp_size: Number of tensor-parallel ranks.
    """

    layer_name: str
    tensor_name: str
    tp_group: Any = None
    tp_size: int = 1


def features() -> Any:
    """`nvdlfw_inspect` functions that call the session's features."""
    import nvdlfw_inspect.api as debug_api

    return debug_api.transformer_engine


def planned(
    location: Location, quantized: dict[str, bool], iteration: int
) -> tuple[TensorPlan, int | None]:
    """Request the plan of a tensor from the features.

    Args:
        location: The tensor.
        quantized: {product: its operands are quantized}.
        iteration: The training step.

    Returns:
        The plan, and the next step in which it may change, None for no step.
    """
    layer, tensor = location.layer_name, location.tensor_name
    api, next_iterations, ways = features(), [], []
    for gemm in GEMMS[tensor]:
        if gemm is None:
            ways.append(None)
            continue
        answer = api.modify_tensor_enabled(
            layer_name=layer, gemm=gemm, tensor_name=tensor, iteration=iteration
        )
        modifies, following = decision(answer, iteration)
        next_iterations.append(following)
        standard = STANDARD_QUANTIZE if quantized[gemm] else HIGH_PRECISION
        ways.append(API_CALL_MODIFY if modifies else standard)
    answer = api.inspect_tensor_enabled(layer_name=layer, tensor_name=tensor, iteration=iteration)
    inspects, following = decision(answer, iteration)
    if inspects:  # the feature returns its next step, and may be disabled in those between
        following = iteration + 1
    return TensorPlan(ways[0], ways[1], inspects), earliest([*next_iterations, following])


def decision(answer: Any, iteration: int) -> tuple[bool, int | None]:
    """Whether a feature is enabled, and the next step in which this may change.

    A feature that returns a bool may change its mind in every step.
    """
    return (
        (bool(answer[0]), answer[1]) if isinstance(answer, tuple) else (bool(answer), iteration + 1)
    )


def earliest(steps: Iterable[int | None]) -> int | None:
    """Earliest step; None without a step."""
    return min([step for step in steps if step is not None], default=None)


class DebugQuantizedTensor(NamedTuple):
    """The two directions of a matrix: quantized tensors, values [M, K], or None.

    Attributes:
        rowwise_gemm_tensor: Read by the product that contracts the last dimension.
        columnwise_gemm_tensor: Read by the product that contracts the rows.
        quantizer: The `DebugQuantizer`.
        layer_name: Layer name.
        tensor_name: Tensor name.
    """

    rowwise_gemm_tensor: Any
    columnwise_gemm_tensor: Any
    quantizer: DebugQuantizer
    layer_name: str
    tensor_name: str

    def get_tensor(self, transpose: bool) -> Any:
        """Select the column-wise direction if `transpose` is set, else the row-wise direction."""
        return self.columnwise_gemm_tensor if transpose else self.rowwise_gemm_tensor


class DebugQuantizer(Observing):
    """Quantizes a layer's tensor as the session's features specify; see the module's docstring.

    Args:
        layer_name: Layer name.
        tensor_name: "activation", "weight", "gradient", "output", "dgrad" or "wgrad".
        parent_quantizer: Quantizer from the layer's recipe; None if the recipe does not quantize the tensor.
        tp_group: The layer's tensor-parallel group.
        tp_size: Number of ranks in the group.
        plan: A step's plan; None requests the present step's plan from the features.
    """

    reads_quantized = True

    def __init__(
        self,
        layer_name: str,
        tensor_name: str,
        parent_quantizer: Quantizer | None,
        tp_group: Any = None,
        tp_size: int = 1,
        plan: TensorPlan | None = None,
    ):
        super().__init__(
            IdentityQuantizer() if parent_quantizer is None else parent_quantizer, _records_nothing
        )
        self.location = Location(layer_name, tensor_name, tp_group, tp_size)
        self._next: int | None = None
        if plan is None:
            plan, self._next = self._is_planned()
        self.plan = plan

    def _is_planned(self) -> tuple[TensorPlan, int | None]:
        api, iteration = features(), TEDebugState.get_iteration()
        quantized, next_iterations = {}, []
        for gemm in GEMMS[self.location.tensor_name]:
            if gemm is not None:
                answer = api.fp8_gemm_enabled(
                    layer_name=self.location.layer_name, gemm=gemm, iteration=iteration
                )
                quantized[gemm], following = decision(answer, iteration)
                next_iterations.append(following)
        plan, following = planned(self.location, quantized, iteration)
        return plan, earliest([*next_iterations, following])

    @property
    def parent_quantizer(self) -> Quantizer | None:
        """Quantizer from the layer's recipe; None if the recipe does not quantize the tensor."""
        return None if self.quantizer.is_identity else self.quantizer

    @parent_quantizer.setter
    def parent_quantizer(self, quantizer: Quantizer | None) -> None:
        """Quantize by another quantizer from now on."""
        self.quantizer = IdentityQuantizer() if quantizer is None else quantizer

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        return self.location.layer_name

    @property
    def tensor_name(self) -> str:
        """Name of the tensor."""
        return self.location.tensor_name

    def any_feature_enabled(self) -> bool:
        """Whether the plan differs from quantization by the layer's own quantizer."""
        standard = (STANDARD_QUANTIZE, None)
        return (
            self.plan.inspects
            or self.plan.rowwise not in standard
            or self.plan.columnwise not in standard
        )

    def get_next_debug_iter(self) -> int | None:
        """Next step in which the plan may change; None for no step."""
        return self._next

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        rows, columns = self._directions(tensor, rowwise, columnwise)
        if rows is columns or columns is None:
            return _storage(rows)
        return HybridQuantizedTensorStorage(
            rowwise_storage=None if rows is None else _storage(rows),
            columnwise_storage=_storage(columns),
            quantizer=self,
            dtype=tensor.dtype,
        )

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        rows, columns = self._directions(matrix, rowwise, columnwise)
        return Operands(self._operand(rows, ROWWISE), self._operand(columns, COLUMNWISE))

    def quantize(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> DebugQuantizedTensor:
        """Quantize both directions of a tensor, as far as the usages request them; `out` and `dtype` have no effect."""
        with torch.no_grad():
            directions = self._directions(
                tensor.detach(), self.rowwise_usage, self.columnwise_usage
            )
        return DebugQuantizedTensor(*directions, self, self.layer_name, self.tensor_name)

    __call__ = quantize  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def multi_tensor_quantize(
        tensor: Tensor,
        quantizers: list[DebugQuantizer],
        m_splits: list[int],
        activation_dtype: torch.dtype,
    ) -> list[DebugQuantizedTensor]:
        """Quantize consecutive row groups, each with its own quantizer.

        Args:
            tensor: All groups' rows [sum of m_splits, K].
            quantizers: One per group.
            m_splits: Number of rows in each group.
            activation_dtype: Dtype of the quantized values.
        """
        parts = tensor.to(activation_dtype).split(m_splits)
        return [quantizer.quantize(part) for quantizer, part in zip(quantizers, parts, strict=True)]

    def process_gemm_output(self, tensor: Tensor) -> Tensor:
        """Pass the result of a product to the features; return it, or its replacement."""
        if torch.compiler.is_compiling():
            return tensor
        if self.plan.rowwise == API_CALL_MODIFY:
            result = self._modify_tensor(tensor, GEMMS[self.tensor_name][0])
            tensor = plain_values(result)
        if self.plan.inspects and not self._is_repeated():
            self._inspect(tensor, rows=None, columns=None)
        return tensor

    def _directions(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> tuple[Any, Any]:
        """Compute the operands for the row-wise and the column-wise products, and call `inspect_tensor`."""
        usages = (rowwise, columnwise)
        ways = (self.plan.rowwise, self.plan.columnwise)
        source, values = tensor, tensor
        if isinstance(tensor, QuantizedTensorStorage):
            values = tensor.dequantize()
        by_quantizer = [
            needed and way == STANDARD_QUANTIZE for needed, way in zip(usages, ways, strict=True)
        ]
        standard = self._standard(source, values, *by_quantizer)
        results: list[Any] = []
        for needed, way, gemm in zip(usages, ways, GEMMS[self.tensor_name], strict=True):
            if not needed:
                results.append(None)
            elif way == API_CALL_MODIFY:
                results.append(self._modify_tensor(values, gemm))
            else:
                results.append(standard if way == STANDARD_QUANTIZE else values)
        # An input that is quantized again, for its column direction, has been inspected.
        first_time = not self._is_repeated() and (rowwise or self.tensor_name == "gradient")
        if self.plan.inspects and first_time:
            self._inspect(values, *results)
        return results[0], results[1]

    def _standard(self, source: Tensor, values: Tensor, rowwise: bool, columnwise: bool) -> Any:
        """Quantize the tensor by the layer's own quantizer."""
        if not (rowwise or columnwise) or self.quantizer.is_identity:
            return values
        if source is not values:  # quantized before
            source.update_usage(rowwise_usage=rowwise or None, columnwise_usage=columnwise or None)  # pyright: ignore
            return source
        result = self.quantizer.encode(values, rowwise, columnwise)
        return self.quantizer.wrap(result) if isinstance(result, QuantizedTensorStorage) else result

    def _modify_tensor(self, tensor: Tensor, gemm: str | None) -> Any:
        return features().modify_tensor(
            layer_name=self.layer_name,
            gemm=gemm,
            tensor_name=self.tensor_name,
            tensor=tensor,
            default_quantizer=self.parent_quantizer,
            iteration=TEDebugState.get_iteration(),
            out=None,
            dtype=tensor.dtype,
        )

    def _inspect(self, tensor: Tensor, rows: Any, columns: Any) -> None:
        if TEDebugState.manager() is None:  # a backward pass after the end of the session
            return
        features().inspect_tensor(
            layer_name=self.layer_name,
            tensor_name=self.tensor_name,
            tensor=tensor,
            rowwise_quantized_tensor=rows if isinstance(rows, QuantizedTensorStorage) else None,
            columnwise_quantized_tensor=columns
            if isinstance(columns, QuantizedTensorStorage)
            else None,
            quantizer=self.parent_quantizer,
            iteration=TEDebugState.get_iteration(),
            tp_group=self.location.tp_group,
            tp_size=self.location.tp_size,
        )

    def _operand(self, quantized: Any, direction: str) -> Any:
        if quantized is None:
            return None
        if isinstance(quantized, QuantizedTensorStorage):
            return get_storage(quantized).contract(direction)  # pyright: ignore[reportArgumentType]
        if isinstance(quantized, Tensor):
            matrix = plain_matrix(quantized)
            return plain(matrix) if direction == ROWWISE else TransposedValues(matrix)
        return contracted(quantized, direction, self.quantizer)

    def _is_repeated(self) -> bool:
        """Whether a backward pass recomputes a forward-pass tensor."""
        return self.tensor_name in _OF_FORWARD and is_backward_pass()

    def replaying(self, state: tuple[Tensor, ...]) -> Quantizer:
        return self._around(self.quantizer.replaying(state))

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> Quantizer:
        return self._around(self.quantizer.with_reduction_group(group))

    def shard_granularity(self, columnwise: bool) -> int | None:
        """Return None: values are gathered, because the directions of a tensor may have different formats."""
        return None

    def _around(self, quantizer: Quantizer) -> DebugQuantizer:
        return DebugQuantizer(
            *self.location[:2], quantizer, self.location.tp_group, self.location.tp_size, self.plan
        )

    def _configuration(self) -> Hashable:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the layer's own quantizer instead, because a model copy does not belong to the session."""
        return _same, (self.quantizer,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        return self.quantizer.__deepcopy__(memo)


class ResultInspector:
    """Passes the results of a layer's products to features.

    Args:
        quantizers: {pass result: its `DebugQuantizer`} for the results that features read or replace.
    """

    def __init__(self, quantizers: dict[str, DebugQuantizer]):
        self.quantizers = quantizers
        self.results = tuple(sorted(quantizers))

    def inspect(self, result: str, value: Tensor) -> Tensor:
        """Return the value, or the replacement that a feature computes from it."""
        return self.quantizers[result].process_gemm_output(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (None,)


def _same(result: Any) -> Any:
    return result


def _records_nothing(matrix: Tensor, operand: Any) -> None:
    pass


def _storage(quantized: Any) -> QuantizedTensorStorage:
    if isinstance(quantized, QuantizedTensorStorage):
        return get_storage(quantized)  # pyright: ignore[reportArgumentType]
    return IdentityTensorStorage(hp_data=quantized)
