"""FP8Attention: FP8 attention for one call, its autograd node, and conversions between values and codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.kernels import launch
from ...primitives.attention.call import AttentionCall, AttentionInputs, AttentionResult, Gradients
from ...primitives.attention.operators import BIAS, SINK
from ...primitives.attention.passes import Passes
from ...runtime.autograd import Function
from ...runtime.device import current_hardware
from ...runtime.double_backward import once_differentiable
from ...runtime.launching import run_program_into
from ...tensor.elements import float8_dtype
from ...tensor.float8_tensor import Float8TensorStorage
from ...tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, get_storage
from ...tensor.quantizer import Quantizer
from ..scale_update import ScaleUpdate

# Columns in the forward state's tensors for (q, k, v), the output and the softmax, as in
# checkpoints. The columns for dqkv, do and dp in the backward state are 0, 3 and 5.
QKV, OUTPUT, SOFTMAX = 2, 3, 8

# Softmax multiplier before rounding. Kernels round its numerators exp(s - max s), which are at most 1, but
# report the largest probability: a multiplier computed from the largest probability would saturate them.
SOFTMAX_SCALE = 256.0

Codes = QuantizedTensorStorage | None

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class AttentionQuantizers(NamedTuple):
    """The quantizers of an attention."""

    qkv: Quantizer
    output: Quantizer
    softmax: Quantizer
    grad_qkv: Quantizer
    grad_output: Quantizer
    grad_softmax: Quantizer

    @classmethod
    def of(cls, qkv: Any, output: Any, softmax: Any) -> AttentionQuantizers:
        """Return the quantizers in the three products of a recipe state, where an attention uses six slots."""
        return cls(
            qkv.output,
            output.input,
            softmax.output,
            qkv.grad_output,
            output.grad_input,
            softmax.grad_input,
        )


class FP8Passes(NamedTuple):
    """Implementations of the two passes.

    Attributes:
        forward, backward: The passes.
        plain: Passes in the call's own dtype, for emulation and for high-precision gradients.
        high_precision: The backward pass reads o in the call's dtype, not its codes.
        quantizes_again: The backward pass reads q, k and v before quantization; the forward pass returns no codes
            for them.
    """

    forward: Callable[[FP8Attention, AttentionInputs], Rounded]
    backward: Callable[[FP8Attention, AttentionInputs, Rounded, Tensor], Gradients]
    plain: Passes
    high_precision: bool
    quantizes_again: bool = False


# torch 2.11's compiler hashes an instance before its attributes exist
@dataclass(frozen=True, eq=False)
class FP8Attention:
    """FP8 attention for one call, in place of a backend.

    Attributes:
        call: The attention, in its own dtype.
        scaling: "delayed", "current", "mxfp8" or "block".
        quantizers: Quantizers for its tensors.
        state: Forward delayed-scaling state if kernels may read and write it; otherwise None.
        passes: Implementations of the two passes.
        fp8_output: The output is returned as a Float8Tensor, and is not needed in the call's dtype.
        scale_update: Gradient scale update after the backward pass.
    """

    call: AttentionCall
    scaling: str
    quantizers: AttentionQuantizers
    state: Any
    passes: FP8Passes
    fp8_output: bool
    scale_update: ScaleUpdate | None

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v], differentiable in q, k, v, bias and sink."""
        if self.call.needs_gradient:
            return AttentionResult(*_FP8Attention.apply(self, *inputs))
        rounded = self.passes.forward(self, inputs)
        return AttentionResult(self.result(rounded), rounded.max_logit)

    def with_quantizers(self, quantizers: AttentionQuantizers) -> FP8Attention:
        """Return the attention with other quantizers, which no kernel knows as a state."""
        return replace(self, quantizers=quantizers, state=None)

    def result(self, rounded: Rounded) -> Tensor:
        """Return the output of a forward pass as the caller receives it."""
        if self.fp8_output:
            assert rounded.codes is not None
            return self.quantizers.output.wrap(rounded.codes)
        assert rounded.output is not None
        return rounded.output.flatten(-2)


class Rounded(NamedTuple):
    """Forward-pass results: q, k, v as codes, o [.., h, d_v] as codes and as values, its statistics.

    Attributes:
        q, k, v: Codes; None if the backward pass quantizes the values again.
        codes: o as codes; None if it has none.
        output: o as values; None if the caller takes the codes.
        unrounded: o before it was quantized, if the forward pass has it. The gradients need the sum of do * o over
            d, and the error of o's codes in this sum moves all logits of a row.
    """

    q: Codes
    k: Codes
    v: Codes
    codes: Codes
    output: Tensor | None
    lse: Tensor | None
    rng_state: Tensor | None = None
    max_logit: Tensor | None = None
    unrounded: Tensor | None = None

    def for_backward(self, passes: FP8Passes) -> Rounded:
        """Return the results that the backward pass reads, with o in one form."""
        if not passes.high_precision:
            return self._replace(output=None, unrounded=None)
        if self.unrounded is not None:
            return self._replace(codes=None, output=None)
        return self if self.output is None else self._replace(codes=None)


def quantize_heads(x: Tensor, quantizer: Quantizer) -> QuantizedTensorStorage:
    """Quantize x [.., h, d] to codes [.., h * d]; the codes of a quantized tensor are used unchanged."""
    if isinstance(x, QuantizedTensor):
        storage = get_storage(x)
        flat = storage.with_shape((*x.shape[:-2], x.shape[-2] * x.shape[-1]))
        if flat is not None:
            return flat
        x = storage.decode(x.dtype)
    return quantizer.encode(x.flatten(-2), True, False)


def dequantize_heads(storage: QuantizedTensorStorage, dtype: torch.dtype, heads: int) -> Tensor:
    """Dequantize codes [.., h * d] to values [.., h, d]."""
    if isinstance(storage, Float8TensorStorage) and _launchable(storage._data):
        return launch_values(storage, dtype, None, None).unflatten(-1, (heads, -1))
    return storage.decode(dtype).unflatten(-1, (heads, -1))


def _launchable(codes: Tensor | None) -> bool:
    """Return whether a Triton kernel can read these codes."""
    if codes is None or not codes.is_cuda or torch.compiler.is_compiling():
        return False
    return (
        launch.unavailable_reason(current_hardware()) is None
        and codes.is_contiguous()
        and codes.numel() > 0
    )


def launch_values(
    storage: Float8TensorStorage, dtype: torch.dtype, amax: Tensor | None, history: Tensor | None
) -> Tensor:
    """Dequantize codes in one launch, which also records amax [2] (output and softmax) in row 0 of a history."""
    from ....common.kernels import fp8_attention

    data = storage._data
    assert data is not None
    record = fp8_attention.value_launch(data.numel(), (SOFTMAX, OUTPUT), _NAMES[dtype])
    values = torch.empty(data.shape, dtype=dtype, device=data.device)
    codes = data.view(float8_dtype(storage._fp8_dtype))
    run_program_into(record, (codes, storage._scale_inv, amax, history, values), data.device)
    return values


class _FP8Attention(Function):
    """Autograd node for the two passes."""

    @staticmethod
    def forward(ctx: Any, attention: FP8Attention, *tensors: Any) -> Any:
        inputs = AttentionInputs(*tensors)
        rounded = attention.passes.forward(attention, inputs)
        ctx.attention = attention
        values = inputs[:3] if attention.passes.quantizes_again else (None, None, None)
        saved = (*values, *inputs[3:], *rounded.for_backward(attention.passes))
        ctx.forms, flat = _flatten_values(saved)
        ctx.save_for_backward(*flat)
        if rounded.max_logit is not None:
            ctx.mark_non_differentiable(rounded.max_logit)
        return attention.result(rounded), rounded.max_logit

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        attention: FP8Attention = ctx.attention
        values = _restore_values(ctx.saved_tensors, ctx.forms)
        count = len(AttentionInputs._fields)
        inputs, rounded = AttentionInputs(*values[:count]), Rounded(*values[count:])
        if isinstance(grad_output, QuantizedTensor):
            grad_output = grad_output.dequantize()
        grad_output = grad_output.unflatten(-1, (attention.call.heads, attention.call.head_dim_v))
        gradients = attention.passes.backward(attention, inputs, rounded, grad_output)
        if attention.scale_update is not None:
            attention.scale_update.run()
        of_tensors: list[Tensor | None] = [None] * count
        of_tensors[:3] = gradients[:3]
        of_tensors[BIAS], of_tensors[SINK] = gradients.bias, gradients.sink
        return None, *of_tensors


def _flatten_values(values: Sequence[Any]) -> tuple[list[tuple[int, Any]], list[Tensor | None]]:
    """Return how to restore values, and their tensors, which `save_for_backward` takes."""
    forms: list[tuple[int, Any]] = []
    tensors: list[Tensor | None] = []
    for x in values:
        if isinstance(x, QuantizedTensorStorage):
            parts, rebuild = QuantizedTensorStorage.flatten(
                get_storage(x) if isinstance(x, QuantizedTensor) else x
            )
            tensors += parts
            forms.append((len(parts), rebuild))
        else:
            tensors.append(x)
            forms.append((1, None))
    return forms, tensors


def _restore_values(
    tensors: Sequence[Tensor | None], forms: Sequence[tuple[int, Any]]
) -> list[Any]:
    """Return the values that `_flatten_values` decomposed."""
    values: list[Any] = []
    start = 0
    for count, rebuild in forms:
        part = tensors[start : start + count]
        values.append(part[0] if rebuild is None else rebuild(part))
        start += count
    return values
