"""Choice of the forward and the backward pass in FP8 attention (fp8_dpa, or fp8_mha with an FP8 output).

The passes are chosen separately. On Hopper the FP8 backward pass is slower than the 16-bit one (H200, batch 2, 8192
tokens, 32 query and 8 key heads of 128, causal: 7.5 ms and 5.0 ms), so that it runs only if NVTE_FP8_DPA_BWD=1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, Table, Unsupported, interventions
from ....common.memory import Memory
from ....common.warning import warn_once
from ...primitives.attention.backends import cudnn, cudnn_blocks, cudnn_fp8
from ...primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
    AttentionResult,
    Feature,
    Gradients,
)
from ...primitives.attention.choose import choose_passes
from ...primitives.attention.operators import passes_when_traced
from ...primitives.attention.passes import Passes
from . import blocks_cudnn, fp8_cudnn, fp8_emulation
from .fp8_attention import AttentionQuantizers, FP8Attention, FP8Passes, Rounded, dequantize_heads


class BackwardRequest(NamedTuple):
    """Request for a backward pass.

    Attributes:
        call: The attention, with `fp8` set.
        forward: Forward-pass backend.
        requested: True for FP8, False for high precision, None for the faster one.
    """

    call: AttentionCall
    forward: str
    requested: bool | None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Call features."""
        return self.call.features


def _unsupported_cudnn_forward(call: AttentionCall) -> str | None:
    if call.fp8 not in ("delayed", "current"):
        return f"the recipe scales blocks; it takes one scale per tensor; {cudnn_fp8.DECODED}"
    return cudnn_fp8.unsupported_reason(call)


EVERYTHING = frozenset(Feature)


def _unsupported_emulation(call: AttentionCall) -> str | None:
    if call.batch_invariant and call.fp8 != "delayed":
        return f"{call.fp8} scales of attention are computed from several tokens; use DelayedScaling, or 16 bits"
    if call.batch_invariant and call.device_type == "cuda":
        return "on a GPU a row's result depends on the other rows, by products that are planned for their number"
    return None


FORWARD: Table[AttentionCall] = Table(
    "fp8_attention",
    (
        Backend(
            "cudnn",
            takes=cudnn_fp8.TAKES,
            unsupported_reason=_unsupported_cudnn_forward,
            bind=lambda request: fp8_cudnn.forward,
        ),
        Backend(
            cudnn_blocks.NAME,
            takes=cudnn_blocks.TAKES,
            unsupported_reason=cudnn_blocks.unsupported_reason,
            bind=lambda request: blocks_cudnn.forward,
        ),
        Backend(
            "emulated",
            takes=EVERYTHING,
            unsupported_reason=_unsupported_emulation,
            bind=lambda request: fp8_emulation.forward,
        ),
    ),
)


def _unsupported_cudnn_backward(request: BackwardRequest) -> str | None:
    if request.requested is False:
        return "high precision is asked for (NVTE_FP8_DPA_BWD=0, or bf16_backward)"
    if request.forward != "cudnn":
        return f"the forward pass is {request.forward!r}"
    if request.call.fp8 != "delayed":
        return "it needs the scale of dP before dP; only delayed scaling has one"
    if request.requested is None:
        measured = "slower than 16 bits on compute capability 9.0"
        if request.call.hardware.has("tensor memory"):
            measured = f"not measured on {request.call.hardware.title}"
        return f"{measured}; NVTE_FP8_DPA_BWD=1 asks for it"
    return cudnn_fp8.unsupported_backward(request.call)


def _unsupported_cudnn_blocks_backward(request: BackwardRequest) -> str | None:
    if request.requested is False:
        return "high precision is asked for (NVTE_FP8_DPA_BWD=0, or bf16_backward)"
    if request.forward != cudnn_blocks.NAME:
        return f"the forward pass is {request.forward!r}"
    if request.requested is None:
        return f"not measured on {request.call.hardware.title}; NVTE_FP8_DPA_BWD=1 asks for it"
    return cudnn_blocks.unsupported_backward(request.call)


def _unsupported_high_precision(request: BackwardRequest) -> str | None:
    # The emulated backward pass reads codes by rows, which the forward pass with block scales does not return.
    return (
        "NVTE_FP8_DPA_BWD=1 asks for FP8"
        if request.requested and request.forward != cudnn_blocks.NAME
        else None
    )


def high_precision(
    attention: FP8Attention, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor
) -> Gradients:
    """Compute the gradients in the call's dtype from the quantized q, k and v, whose statistics the forward pass has.

    The probabilities are exp(s - lse). With logits s from the values before quantization, whose rounding error grows
    with the logits, they would not have the sum 1.
    """
    call = attention.call
    if rounded.q is None or rounded.k is None or rounded.v is None:
        q, k, v = blocks_cudnn.quantized_values(attention, inputs)
    else:
        q = dequantize_heads(rounded.q, call.dtype, call.heads)
        k = dequantize_heads(rounded.k, call.dtype, call.groups)
        v = dequantize_heads(rounded.v, call.dtype, call.groups)
    output = rounded.output if rounded.unrounded is None else rounded.unrounded
    if output is None:
        assert rounded.codes is not None
        output = dequantize_heads(rounded.codes, call.dtype, call.heads)
    attended = Attended(output, rounded.lse, rounded.rng_state)
    inputs = inputs._replace(q=q, k=k, v=v)
    return attention.passes.plain.backward(call, inputs, attended, grad_output.contiguous())


BACKWARD: Table[BackwardRequest] = Table(
    "fp8_attention_backward",
    (
        Backend(
            "cudnn",
            takes=cudnn_fp8.TAKES,
            unsupported_reason=_unsupported_cudnn_backward,
            bind=lambda request: fp8_cudnn.backward,
        ),
        Backend(
            cudnn_blocks.NAME,
            takes=cudnn_blocks.TAKES,
            unsupported_reason=_unsupported_cudnn_blocks_backward,
            bind=lambda request: blocks_cudnn.backward,
        ),
        Backend(
            "high_precision",
            takes=EVERYTHING,
            unsupported_reason=_unsupported_high_precision,
            bind=lambda request: high_precision,
        ),
        Backend(
            "emulated",
            takes=EVERYTHING,
            unsupported_reason=lambda request: _unsupported_emulation(request.call),
            bind=lambda request: fp8_emulation.backward,
        ),
    ),
)


PassesKey = tuple[AttentionCall, str, bool | None]


def choose_fp8(call: AttentionCall, scaling: str, requested: bool | None) -> FP8Passes:
    """Return both passes for a call, cached; requested: see `BackwardRequest`."""
    if torch.compiler.is_compiling():
        # Emulation, which a tracing compiler sees through; cuDNN's FP8 kernels write the state in place.
        if (reason := _unsupported_emulation(replace(call, fp8=scaling))) is not None:
            raise Unsupported(
                f"FP8 attention under torch.compile is emulated; {reason}; compute it in 16 bits"
            )
        plain = passes_when_traced(call)
        if requested:
            return FP8Passes(fp8_emulation.forward, fp8_emulation.backward, plain, False)
        return FP8Passes(fp8_emulation.forward, high_precision, plain, True)
    key = (call, scaling, requested)
    return _choose_passes(key) if interventions else _PASSES[key]


def _choose_passes(key: PassesKey) -> FP8Passes:
    call, scaling, requested = key
    in_fp8 = replace(call, fp8=scaling)
    forward: Any = FORWARD.bind(in_fp8)
    backward: Any = high_precision
    name = _FORWARD_NAMES.get(forward, "emulated")
    if call.needs_gradient:
        backward = BACKWARD.bind(BackwardRequest(in_fp8, name, requested))
        if requested and backward is high_precision:
            warn_once(
                f"NVTE_FP8_DPA_BWD=1 after {name}",
                f"NVTE_FP8_DPA_BWD=1 has no effect: the backward pass {name!r} does not support this attention "
                f"({cudnn_blocks.unsupported_backward(in_fp8)}); its gradients are computed in high precision",
            )
    plain = None
    if name != "emulated" and cudnn.BACKEND.rejection_reason(call) is None:
        # After cuDNN's FP8 kernel its own 16-bit backward, whose statistics are the same.
        plain = cudnn.bind(call)
    if not isinstance(plain, Passes):
        plain = choose_passes(call)
    return FP8Passes(
        forward,
        backward,
        plain,
        high_precision=backward in (high_precision, blocks_cudnn.backward),
        quantizes_again=forward is blocks_cudnn.forward,
    )


_FORWARD_NAMES: dict[Any, str] = {
    fp8_cudnn.forward: "cudnn",
    blocks_cudnn.forward: cudnn_blocks.NAME,
}


_PASSES: Memory[PassesKey, FP8Passes] = Memory(_choose_passes, 1024)


class RecomputedFP8Attention:
    """An attention that runs again in its backward pass, with the scales of the first run."""

    def __init__(self, attention: Any):
        self.attention = attention
        self.again: Any = None

    def __call__(self, call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        """Return o [.., h * d_v], differentiable in q, k, v, bias and sink."""
        if self.again is not None:
            return self.again(call, inputs)
        first = self.attention.quantizers
        quantizers = AttentionQuantizers(
            *(quantizer.replaying(quantizer.replay_state()) for quantizer in first[:3]), *first[3:]
        )
        self.again = self.attention.with_quantizers(quantizers)
        return self.attention(call, inputs)
