"""Forward and backward function of an operation in one call kind, and the values between operations.

`OperationPasses` is the private contract between operations of this package: `fused_forward(x, tensors,
request)` and `fused_backward(operands, leading, grads, request)`. `chain.py` calls them one after another.
`request` is the cast that the neighbor requests (`input_request`, `gradient_request`), so that one kernel
computes a matrix and quantizes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fast.symbols import Symbol
from ...functions.layer import leading_shape
from ...functions.linear_spec import LinearSpec
from ...primitives.gemm import as_matrix
from ...primitives.quantize import Cast
from ...quantization.autocast import AutocastState
from ...runtime.tracing import reshape_result
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ...tensor.quantizer import Quantizer
from ...tensor.storage.quantized_tensor_storage import plain_values


class InputFacts(NamedTuple):
    """Operation input metadata, on which its passes may depend."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False
    subclass: bool = False

    @staticmethod
    def of(x: Any) -> InputFacts:
        """Tensor metadata: plain, quantized, or another subclass."""
        quantized = isinstance(x, QuantizedTensorStorage)
        subclass = not quantized and type(x) not in (Tensor, torch.nn.Parameter)
        return InputFacts(tuple(x.shape), x.dtype, x.device, quantized, subclass)


@dataclass(slots=True)
class OperationCall:
    """Call metadata on which the passes may depend, in addition to the input and the operation.

    Attributes:
        state: The autocast state.
        autocast: torch.autocast dtype where it is active, else None.
        traced: A compiler is tracing.
        saves: A backward pass will reach the operation.
        grad_input: The operation's input gradient is needed.
        records: Gradients are recorded, so that a later reader of a result may need it in the backward pass.
        extra: Metadata of the extra inputs.
        extra_tensors: The extra inputs.
        options: Operation keyword arguments.
    """

    state: AutocastState
    autocast: torch.dtype | None
    traced: bool
    saves: bool
    grad_input: bool
    records: bool
    extra: tuple[InputFacts, ...]
    extra_tensors: tuple[Tensor, ...]
    options: dict[str, Any]


# Dimensions in place of matrix rows [M, N]; None for a tensor in its own shape.
Leading = tuple[int, ...] | None


class Value(NamedTuple):
    """A value between two operations.

    Attributes:
        data: A tensor, a quantized tensor, or the `Operands` of the next product.
        leading: Dimensions in place of M, if `data` is a matrix [M, N]; None for a tensor in its own shape.
        owned: Nothing else reads the value's memory, so that the next operation may overwrite it.
    """

    data: Any
    leading: Leading = None
    owned: bool = False

    def leading_dimensions(self) -> tuple[int, ...]:
        """Dimensions before the last."""
        return tuple(self.data.shape[:-1]) if self.leading is None else self.leading

    def values(self) -> Value:
        """The value without quantization."""
        if isinstance(self.data, QuantizedTensorStorage):
            return Value(plain_values(self.data), self.leading)
        return self

    def matrix(self) -> Value:
        """The value without quantization as a matrix [M, N]."""
        if self.leading is not None:
            return self.values()
        leading = self.leading_dimensions()
        return Value(as_matrix(self.values().data), leading)

    def shaped(self) -> Any:
        """The tensor without quantization in its own shape."""
        data = self.values().data
        if self.leading is None:
            return data
        shape = (*leading_shape(self.leading, data.shape[0]), data.shape[-1])
        return data.view(shape) if type(data) is Symbol else reshape_result(data, shape)

    def result(self) -> Any:
        """The tensor that a chain returns: a quantized one unchanged, any other in its own shape."""
        return self.data if isinstance(self.data, QuantizedTensorStorage) else self.shaped()

    def converted(self, dtype: torch.dtype | None) -> Value:
        """The value in a dtype; None leaves it unchanged."""
        return self if dtype is None else Value(self.values().data.to(dtype), self.leading)


class OpTensors(NamedTuple):
    """Tensors of one operation in a call: its parameters in name order, and its extra inputs."""

    parameters: Sequence[Tensor]
    extra: Sequence[Tensor]


class ReaderCast(NamedTuple):
    """How the producer of a matrix quantizes it for the operation that reads it.

    Attributes:
        quantizer: The reader's quantizer.
        cast: Its cast.
        sums: In a backward pass, dtype for the column sums that the reader needs too; None without sums.
    """

    quantizer: Quantizer
    cast: Cast
    sums: torch.dtype | None = None


class ForwardResult(NamedTuple):
    """Forward results of one operation.

    Attributes:
        output: The main output.
        saved: Values that the backward pass reads.
        extra: The extra outputs.
    """

    output: Value
    saved: Sequence[Any] = ()
    extra: tuple[Value, ...] = ()


class BackwardResult(NamedTuple):
    """Backward results of one operation.

    Attributes:
        grad_input: Main input gradient; None if it is not needed.
        parameters: Parameter gradients, in the order of `parameters()`.
        extra: Extra input gradients.
    """

    grad_input: Value | None
    parameters: Sequence[Any] = ()
    extra: Sequence[Value | None] = ()


class OperationPasses:
    """Forward and backward function of one operation in one call kind.

    It holds everything that the functions read apart from tensors: specs, quantizers, dtypes.

    Attributes:
        is_identity: The output is the input, and nothing else is computed.
        absent_gradients: Parameter gradients where `gradient_is_unchanged` is True: None for each.
        casts_output, casts_gradient: A kernel in the forward, or backward, pass can quantize its result.
        listed: The forward function only starts kernels, products and collectives, which a compiled pass can list.
    """

    is_identity: bool = False
    absent_gradients: tuple[None, ...] = ()
    casts_output: bool = False
    casts_gradient: bool = False
    listed: bool = True

    def gradient_is_unchanged(self, grads: Sequence[Any]) -> bool:
        """Whether the backward pass is the identity: dx is dy, and no other gradient is computed.

        Args:
            grads: Extra output gradients; None for an absent one.
        """
        return self.is_identity

    def linears(self) -> tuple[LinearSpec, ...]:
        """Product specs."""
        return ()

    def bound(self, extra: Sequence[Tensor]) -> OperationPasses:
        """Passes for one call, for an operation whose settings depend on its extra input values."""
        return self

    def input_request(self) -> ReaderCast | None:
        """The cast that the kernel computing the operation's input may perform; None if it must not quantize."""
        return None

    def gradient_request(self, earlier: ReaderCast | None) -> ReaderCast | None:
        """The cast that the kernel computing this operation's output gradient may perform; None for no cast.

        Args:
            earlier: The previous operation's request, whose gradient is this operation's result.
        """
        return None

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        """Compute the forward pass.

        Args:
            x: The input; `Operands` if its producer has granted `input_request`.
            tensors: Parameters and extra inputs.
            request: The next operation's cast. An operation whose kernel performs it returns `Operands`.
        """
        raise NotImplementedError

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        """Compute the backward pass.

        Args:
            operands: The output gradient, a `GradientOperands` if its producer has granted
                `gradient_request`; then the values that `fused_forward` saved. The list is emptied,
                so that each buffer is freed after its last reader.
            leading: Dimensions in place of gradient rows; None for a gradient in its own shape.
            grads: Extra output gradients; None for an absent one.
            request: The previous operation's cast. An operation whose kernel performs it returns a
                `GradientOperands`.
        """
        raise NotImplementedError


class IdentityPasses(OperationPasses):
    """y = x."""

    is_identity = True

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        return ForwardResult(x)

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        return BackwardResult(Value(operands.pop(), leading))
