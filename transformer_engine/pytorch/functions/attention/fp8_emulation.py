"""FP8 attention without FP8 kernels: quantize and dequantize the tensors around an attention in their own dtype.

Any backend computes the attention. The reference backend also rounds the softmax P and the logit
gradient, where FP8 kernels round them; other backends keep both in accumulator precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.attention import reference
from ...primitives.attention.call import Attended, AttentionCall, AttentionInputs, Gradients
from ...primitives.attention.dense import Rounding
from ...tensor.quantizer import Quantizer
from .fp8_attention import SOFTMAX_SCALE, FP8Attention, Rounded, dequantize_heads, quantize_heads


def forward(attention: FP8Attention, inputs: AttentionInputs) -> Rounded:
    """Compute attention from the dequantized q, k and v; the output is quantized."""
    call, quantizers = attention.call, attention.quantizers
    q, k, v = (quantize_heads(x, quantizers.qkv) for x in inputs[:3])
    values = round_inputs(call, inputs, q, k, v)
    if attention.passes.plain.name == reference.PASSES.name:
        attended = reference.forward(call, values, _rounding_of_softmax(quantizers.softmax))
    else:
        attended = attention.passes.plain.forward(call, values)
    codes = quantizers.output.encode(attended.output.flatten(-2), True, False)
    output = None if attention.fp8_output else dequantize_heads(codes, call.dtype, call.heads)
    return Rounded(
        q,
        k,
        v,
        codes,
        output,
        attended.lse,
        attended.rng_state,
        attended.max_logit,
        unrounded=attended.output,
    )


def round_inputs(call: AttentionCall, inputs: AttentionInputs, *codes: object) -> AttentionInputs:
    """Return the inputs with dequantized q, k and v."""
    q, k, v = codes
    return inputs._replace(
        q=dequantize_heads(q, call.dtype, call.heads),  # pyright: ignore[reportArgumentType]
        k=dequantize_heads(k, call.dtype, call.groups),  # pyright: ignore[reportArgumentType]
        v=dequantize_heads(v, call.dtype, call.groups),  # pyright: ignore[reportArgumentType]
    )


def backward(
    attention: FP8Attention, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor
) -> Gradients:
    """Compute gradients from the dequantized tensors and a dequantized dO; they are quantized and dequantized too."""
    call, quantizers = attention.call, attention.quantizers
    values = round_inputs(call, inputs, rounded.q, rounded.k, rounded.v)
    grad_output = dequantize_heads(
        quantize_heads(grad_output, quantizers.grad_output), call.dtype, call.heads
    )
    assert rounded.codes is not None
    output = dequantize_heads(rounded.codes, call.dtype, call.heads)
    attended = Attended(output, rounded.lse, rounded.rng_state)
    if attention.passes.plain.name == reference.PASSES.name:
        round_ds = (
            None
            if attention.scaling not in ("delayed", "current")
            else _rounding(quantizers.grad_softmax)
        )
        roundings = _rounding_of_softmax(None), round_ds
        found = reference.backward(call, values, attended, grad_output, *roundings)
    else:
        found = attention.passes.plain.backward(call, values, attended, grad_output.contiguous())
    q, k, v = (
        dequantize_heads(quantize_heads(x, quantizers.grad_qkv), call.dtype, heads)
        for x, heads in ((found.q, call.heads), (found.k, call.groups), (found.v, call.groups))
    )
    return found._replace(q=q, k=k, v=v)


def _rounding(quantizer: Quantizer) -> Rounding:
    """Return a function that quantizes and dequantizes a tensor."""

    def round_values(x: Tensor) -> Tensor:
        return quantizer.encode(x, True, False).decode(x.dtype)

    return round_values


def _rounding_of_softmax(records: Quantizer | None) -> Rounding:
    """Return a function that rounds exp(s - max s) to e4m3, as FP8 kernels do, and rescales the result to p.

    Args:
        records: Quantizer that records the largest p.
    """

    def round_values(p: Tensor) -> Tensor:
        if records is not None:
            records.calibrate(p)
        largest = p.amax(dim=-1, keepdim=True)
        largest = torch.where(largest > 0.0, largest, 1.0)
        codes = (p / largest * SOFTMAX_SCALE).to(torch.float8_e4m3fn)
        return codes.to(p.dtype) * (largest / SOFTMAX_SCALE)

    return round_values
