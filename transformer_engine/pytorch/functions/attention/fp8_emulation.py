"""FP8 attention without FP8 kernels: tensors are rounded to codes and back round an attention in their own dtype.

Any backend serves for the attention. The reference one rounds the softmax P and the gradient of the logits too,
where FP8 kernels round them; others keep both to themselves, in their accumulators' precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.attention import reference
from ...primitives.attention.dense import Rounding
from ...primitives.attention.request import Attended, AttentionInputs, AttentionRequest, Gradients
from ...tensor.quantizer import Quantizer
from .fp8_call import SOFTMAX_SCALE, Call, Rounded, codes_of, values_of


def forward(call: Call, inputs: AttentionInputs) -> Rounded:
    """Attention to the values of codes; its result as codes."""
    r, slots = call.request, call.slots
    q, k, v = (codes_of(x, slots.qkv) for x in inputs[:3])
    values = rounded_inputs(r, inputs, q, k, v)
    if call.passes.name == reference.PASSES.name:
        attended = reference.forward(r, values, _rounding_of_softmax(slots.softmax))
    else:
        attended = call.passes.forward(r, values)
    codes = slots.output.encode(attended.output.flatten(-2), True, False)
    output = values_of(codes, r.shape.dtype, r.shape.heads) if call.wants_values else None
    return Rounded(q, k, v, codes, output, attended.lse, attended.rng_state, attended.max_logit)


def rounded_inputs(r: AttentionRequest, inputs: AttentionInputs, *codes: object) -> AttentionInputs:
    """The inputs with the values of codes for q, k and v."""
    q, k, v = codes
    return inputs._replace(
        q=values_of(q, r.shape.dtype, r.shape.heads),  # pyright: ignore[reportArgumentType]
        k=values_of(k, r.shape.dtype, r.shape.groups),  # pyright: ignore[reportArgumentType]
        v=values_of(v, r.shape.dtype, r.shape.groups),  # pyright: ignore[reportArgumentType]
    )


def backward(call: Call, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor) -> Gradients:
    """Gradients at the rounded tensors, of a rounded dO, themselves rounded."""
    r, slots = call.request, call.slots
    values = rounded_inputs(r, inputs, rounded.q, rounded.k, rounded.v)
    grad_output = values_of(codes_of(grad_output, slots.grad_output), r.shape.dtype, r.shape.heads)
    output = (
        values_of(rounded.codes, r.shape.dtype, r.shape.heads) if rounded.output is None else rounded.output
    )
    attended = Attended(output, rounded.lse, rounded.rng_state)
    if call.passes.name == reference.PASSES.name:
        round_ds = None if call.scaling == "block" else _rounding(slots.grad_softmax)
        roundings = _rounding_of_softmax(None), round_ds
        found = reference.backward(r, values, attended, grad_output, *roundings)
    else:
        found = call.passes.backward(r, values, attended, grad_output.contiguous())
    q, k, v = (
        values_of(codes_of(x, slots.grad_qkv), r.shape.dtype, heads)
        for x, heads in ((found.q, r.shape.heads), (found.k, r.shape.groups), (found.v, r.shape.groups))
    )
    return found._replace(q=q, k=k, v=v)


def _rounding(quantizer: Quantizer) -> Rounding:
    """x -> the values of its codes."""

    def rounded(x: Tensor) -> Tensor:
        return quantizer.encode(x, True, False).decode(x.dtype)

    return rounded


def _rounding_of_softmax(records: Quantizer | None) -> Rounding:
    """p -> e4m3 of exp(s - max s), which FP8 kernels round, times what makes it p again.

    records   learns the largest p
    """

    def rounded(p: Tensor) -> Tensor:
        if records is not None:
            records.calibrate(p)
        largest = p.amax(dim=-1, keepdim=True)
        largest = torch.where(largest > 0.0, largest, 1.0)
        codes = (p / largest * SOFTMAX_SCALE).to(torch.float8_e4m3fn)
        return codes.to(p.dtype) * (largest / SOFTMAX_SCALE)

    return rounded
