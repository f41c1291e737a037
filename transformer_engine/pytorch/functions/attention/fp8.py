"""o = attention(q, k, v) on FP8 tensors, where a recipe asks for it: fp8_dpa, or fp8_mha with o in FP8 as well.

The recipe state of an attention has three products' slots, of which it uses six: see `fp8_call`. What the backward
pass computes in is a choice of its own. On Hopper the FP8 backward is slower than the one in 16 bits (H200, batch 2,
8192 tokens, 32 query and 8 key heads of 128, causal: 7.5 ms, 5.0 ms), so that it runs only when
NVTE_FP8_DPA_BWD=1 asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, Table, undisturbed
from ....common.memory import Memory
from ...primitives.attention.backends import cudnn, cudnn_fp8
from ...primitives.attention.choose import passes_of
from ...primitives.attention.operators import passes_when_traced
from ...primitives.attention.passes import Passes
from ...primitives.attention.request import (
    Attended,
    AttentionInputs,
    AttentionRequest,
    AttentionResult,
    Feature,
    Gradients,
)
from ...runtime.double_backward import once_differentiable
from ...tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, storage_of
from ..scale_update import ScaleUpdate
from . import fp8_cudnn, fp8_emulation
from .fp8_call import Call, Rounded, Slots, values_of


class BackwardRequest(NamedTuple):
    """What the choice of a backward pass depends on; asked: for FP8 (True), high precision (False), the faster."""

    attention: AttentionRequest
    forward: str
    asked: bool | None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Those of the attention."""
        return self.attention.features


def _refuses_cudnn_forward(request: AttentionRequest) -> str | None:
    if request.options.fp8 == "block":
        return "the recipe scales blocks; it takes one scale a tensor"
    return cudnn_fp8.refuses(request)


EVERYTHING = frozenset(Feature)

FORWARD: Table[AttentionRequest] = Table(
    "fp8_attention",
    (
        Backend(
            "cudnn",
            takes=cudnn_fp8.TAKES,
            refuses=_refuses_cudnn_forward,
            bind=lambda request: fp8_cudnn.forward,
        ),
        Backend("emulated", takes=EVERYTHING, bind=lambda request: fp8_emulation.forward),
    ),
)


def _refuses_cudnn_backward(request: BackwardRequest) -> str | None:
    if request.asked is False:
        return "high precision is asked for (NVTE_FP8_DPA_BWD=0, or bf16_backward)"
    if request.forward != "cudnn":
        return f"the forward pass is {request.forward!r}"
    if request.attention.options.fp8 != "delayed":
        return "it needs the scale of dP before dP; only delayed scaling has one"
    if request.asked is None:
        return "slower than 16 bits on compute capability 9.0; NVTE_FP8_DPA_BWD=1 asks for it"
    return cudnn_fp8.refuses_backward(request.attention)


def _refuses_high_precision(request: BackwardRequest) -> str | None:
    return "NVTE_FP8_DPA_BWD=1 asks for FP8" if request.asked else None


def high_precision(call: Call, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor) -> Gradients:
    """Gradients at the unrounded tensors, with the statistics of the forward pass."""
    r = call.request
    q, k, v = (x.decode(r.shape.dtype) if isinstance(x, QuantizedTensorStorage) else x for x in inputs[:3])
    output = rounded.output
    if output is None:
        output = values_of(rounded.codes, r.shape.dtype, r.shape.heads)
    attended = Attended(output, rounded.lse, rounded.rng_state)
    return call.passes.backward(r, inputs._replace(q=q, k=k, v=v), attended, grad_output.contiguous())


BACKWARD: Table[BackwardRequest] = Table(
    "fp8_attention_backward",
    (
        Backend(
            "cudnn",
            takes=cudnn_fp8.TAKES,
            refuses=_refuses_cudnn_backward,
            bind=lambda request: fp8_cudnn.backward,
        ),
        Backend(
            "high_precision",
            takes=EVERYTHING,
            refuses=_refuses_high_precision,
            bind=lambda request: high_precision,
        ),
        Backend("emulated", takes=EVERYTHING, bind=lambda request: fp8_emulation.backward),
    ),
)


@dataclass(frozen=True)
class Attention:
    """The FP8 attention of one call, in the place of a backend."""

    call: Call
    chosen: Chosen
    fp8_output: bool
    scale_update: ScaleUpdate | None

    def run(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        """o [.., h * d_v], differentiable in q, k, v, bias and sink."""
        if request.options.needs_gradient:
            return AttentionResult(*_Attention.apply(self, *inputs))
        rounded = self.chosen.forward(self.call, inputs)
        return AttentionResult(self.result(rounded), rounded.max_logit)

    def result(self, rounded: Rounded) -> Tensor:
        if self.fp8_output:
            return self.call.slots.output.wrap(rounded.codes)
        assert rounded.output is not None
        return rounded.output.flatten(-2)


@dataclass(frozen=True)
class Chosen:
    """The implementations of the two passes; passes: the attention in the request's own dtype beside them."""

    forward: Callable[..., Rounded]
    backward: Callable[..., Gradients]
    passes: Passes

    @property
    def high_precision(self) -> bool:
        """Does the backward pass read the unrounded tensors?"""
        return self.backward is high_precision


Question = tuple[AttentionRequest, str, bool | None]


def choose(request: AttentionRequest, scaling: str, asked: bool | None) -> Chosen:
    """Both passes of a request, looked up where it was met before; asked: see BackwardRequest."""
    if torch.compiler.is_compiling():
        # Emulation, which a tracing compiler sees through; cuDNN's FP8 kernels write the state in place.
        backward = fp8_emulation.backward if asked else high_precision
        return Chosen(fp8_emulation.forward, backward, passes_when_traced(request))
    key = (request, scaling, asked)
    return _CHOSEN[key] if undisturbed() else _choice(key)


def _choice(key: Question) -> Chosen:
    request, scaling, asked = key
    described = request.changed(fp8=scaling)
    forward: Any = FORWARD.bind(described)
    backward: Any = high_precision
    by_cudnn = forward is fp8_cudnn.forward
    if request.options.needs_gradient:
        backward = BACKWARD.bind(BackwardRequest(described, "cudnn" if by_cudnn else "emulated", asked))
    if by_cudnn and cudnn.BACKEND.refusal(request) is None:
        # After cuDNN's FP8 kernel its own 16-bit backward, whose statistics are the same.
        planned = cudnn.bind(request)
        if isinstance(planned, Passes):
            return Chosen(forward, backward, planned)
    return Chosen(forward, backward, passes_of(request))


_CHOSEN: Memory[Question, Chosen] = Memory(_choice, 1024)


class Recomputed:
    """An attention that runs again in its backward pass, with the scales that it had at first."""

    def __init__(self, attention: Attention):
        self.attention = attention
        self.again: Attention | None = None

    def run(self, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
        if self.again is not None:
            return self.again.run(request, inputs)
        call = self.attention.call
        slots = Slots(  # pyright: ignore[reportCallIssue]
            *(quantizer.replaying(quantizer.replay_state()) for quantizer in call.slots[:3]), *call.slots[3:]
        )
        self.again = replace(self.attention, call=call._replace(slots=slots, state=None))
        return self.attention.run(request, inputs)


class _Attention(torch.autograd.Function):
    """Autograd shell of the two passes."""

    @staticmethod
    def forward(ctx: Any, attention: Attention, *tensors: Any) -> Any:
        inputs = AttentionInputs(*tensors)
        rounded = attention.chosen.forward(attention.call, inputs)
        ctx.attention = attention
        keep_inputs = attention.chosen.high_precision
        codes = None if keep_inputs and rounded.output is not None else rounded.codes
        output = rounded.output if keep_inputs else None
        if keep_inputs:
            kept = (*inputs, None, None, None, codes, output, *rounded[5:])
        else:
            kept = (None, None, None, *inputs[3:], *rounded[:3], codes, output, *rounded[5:])
        ctx.forms, flat = _flattened(kept)
        ctx.save_for_backward(*flat)
        result = attention.result(rounded)
        if rounded.max_logit is not None:
            ctx.mark_non_differentiable(rounded.max_logit)
        return result, rounded.max_logit

    @staticmethod
    @once_differentiable("FP8 attention")
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        attention: Attention = ctx.attention
        call = attention.call
        values = _restored(ctx.saved_tensors, ctx.forms)
        count = len(AttentionInputs._fields)
        inputs, rounded = AttentionInputs(*values[:count]), Rounded(*values[count:])
        if isinstance(grad_output, QuantizedTensor):
            grad_output = grad_output.dequantize()
        shape = (call.request.shape.heads, call.request.shape.head_dim_v)
        gradients = attention.chosen.backward(call, inputs, rounded, grad_output.unflatten(-1, shape))
        if attention.scale_update is not None:
            attention.scale_update.run()
        given: list[Tensor | None] = [None] * count
        given[:3] = gradients[:3]
        given[AttentionInputs._fields.index("bias")] = gradients.bias
        given[AttentionInputs._fields.index("sink")] = gradients.sink
        return None, *given


def _flattened(values: Sequence[Any]) -> tuple[list[tuple[int, Any]], list[Tensor | None]]:
    """The forms of values, and their tensors, on their way through save_for_backward."""
    forms: list[tuple[int, Any]] = []
    tensors: list[Tensor | None] = []
    for x in values:
        if isinstance(x, QuantizedTensorStorage):
            parts, rebuild = QuantizedTensorStorage.flatten(
                storage_of(x) if isinstance(x, QuantizedTensor) else x
            )
            tensors += parts
            forms.append((len(parts), rebuild))
        else:
            tensors.append(x)
            forms.append((1, None))
    return forms, tensors


def _restored(tensors: Sequence[Tensor | None], forms: Sequence[tuple[int, Any]]) -> list[Any]:
    """What `_flattened` took apart."""
    values: list[Any] = []
    start = 0
    for count, rebuild in forms:
        part = tensors[start : start + count]
        values.append(part[0] if rebuild is None else rebuild(part))
        start += count
    return values
