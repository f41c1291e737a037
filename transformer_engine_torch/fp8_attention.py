"""The forward pass of an attention to q, k, v that come as FP8 codes, by the backends of FP8 attention."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.functions.attention import fp8, fp8_emulation
from transformer_engine.pytorch.functions.attention.fp8_call import Call, Slots
from transformer_engine.pytorch.primitives.attention.choose import passes_of
from transformer_engine.pytorch.primitives.attention.request import (
    Attended,
    AttentionInputs,
    AttentionRequest,
)
from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from .layout import Layout, reordered


def takes_codes(layout: Layout, *qkv: Any) -> bool:
    """Are all three Float8Tensors, laid out as the backends of FP8 attention read them?"""
    return not (layout.transposed or layout.turned or layout.paged) and all(
        isinstance(x, Float8Tensor) for x in qkv
    )


def reordered_codes(output: Any, source: str, target: str) -> Any:
    """Return the output of an FP8 attention, plain or a Float8Tensor, with its axes in another order."""
    if source == target:
        return output
    if not isinstance(output, Float8Tensor):
        return reordered(output, source, target, "o_format")
    assert output._data is not None
    codes = reordered(output._data, source, target, "o_format").contiguous()
    return Float8Tensor.make_like(output, shape=codes.shape, data=codes, data_transpose=None)


def forward(
    request: AttentionRequest, inputs: AttentionInputs, s_quantizer: Any, o_quantizer: Any
) -> tuple[Any, Attended]:
    """(o [.., h, d_v], as o_quantizer makes it or in the request's dtype for None; the pass's statistics).

    s_quantizer   learns the softmax's largest value, if it keeps one
    """
    scaling = "delayed" if isinstance(o_quantizer, Float8Quantizer) else "current"
    unused = IdentityQuantizer()
    output = unused if o_quantizer is None else o_quantizer
    softmax = unused if s_quantizer is None else s_quantizer
    slots = Slots(unused, output, softmax, unused, unused, unused)
    call = Call(request, scaling, slots, None, passes_of(request), o_quantizer is None)
    described = request.changed(fp8=scaling)
    # Kernels write codes; without a quantizer for them the attention is emulated.
    forward = fp8_emulation.forward if o_quantizer is None else fp8.FORWARD.bind(described)
    rounded: Any = forward(call, inputs)
    attended = Attended(rounded.output, rounded.lse, rounded.rng_state, rounded.max_logit)  # pyright: ignore[reportArgumentType]
    if o_quantizer is None:
        return rounded.output, attended
    codes = o_quantizer.wrap(rounded.codes)
    return codes.view(*codes.shape[:-1], request.shape.heads, request.shape.head_dim_v), attended
