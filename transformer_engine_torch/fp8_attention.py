"""Attention forward pass on FP8 codes for q, k and v, by the FP8 attention backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformer_engine.pytorch.functions.attention import fp8, fp8_emulation
from transformer_engine.pytorch.functions.attention.fp8_attention import (
    AttentionQuantizers,
    FP8Attention,
    FP8Passes,
)
from transformer_engine.pytorch.primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
)
from transformer_engine.pytorch.primitives.attention.choose import choose_passes
from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from .layout import Layout, reorder_axes


def takes_codes(layout: Layout, *qkv: Any) -> bool:
    """Whether all three are Float8Tensors in a layout that the FP8 attention backends support."""
    return not (layout.transposed or layout.turned or layout.paged) and all(
        isinstance(x, Float8Tensor) for x in qkv
    )


def reorder_codes(output: Any, source: str, target: str) -> Any:
    """Permute the axes of an FP8 attention's output, plain or a Float8Tensor."""
    if source == target:
        return output
    if not isinstance(output, Float8Tensor):
        return reorder_axes(output, source, target, "o_format")
    assert output._data is not None
    codes = reorder_axes(output._data, source, target, "o_format").contiguous()
    return Float8Tensor.make_like(output, shape=codes.shape, data=codes, data_transpose=None)


def forward(
    call: AttentionCall, inputs: AttentionInputs, s_quantizer: Any, o_quantizer: Any
) -> tuple[Any, Attended]:
    """Compute FP8 attention on codes.

    Args:
        call: The attention, in its own dtype.
        inputs: Its tensors, q, k and v as Float8Tensors.
        s_quantizer: Records the largest softmax value, if it is a delayed-scaling quantizer.
        o_quantizer: Output quantizer; None returns it in the call's dtype.

    Returns:
        The output [.., h, d_v], and the pass's statistics.
    """
    scaling = "delayed" if isinstance(o_quantizer, Float8Quantizer) else "current"
    unused = IdentityQuantizer()
    output = unused if o_quantizer is None else o_quantizer
    softmax = unused if s_quantizer is None else s_quantizer
    quantizers = AttentionQuantizers(unused, output, softmax, unused, unused, unused)
    # Kernels write codes; without a quantizer for them the attention is emulated.
    forward: Any = (
        fp8_emulation.forward
        if o_quantizer is None
        else fp8.FORWARD.bind(replace(call, fp8=scaling))
    )
    passes = FP8Passes(forward, fp8.high_precision, choose_passes(call), True)
    attention = FP8Attention(call, scaling, quantizers, None, passes, o_quantizer is not None, None)
    rounded = forward(attention, inputs)
    attended = Attended(rounded.output, rounded.lse, rounded.rng_state, rounded.max_logit)
    if o_quantizer is None:
        return rounded.output, attended
    codes = o_quantizer.wrap(rounded.codes)
    return codes.view(*codes.shape[:-1], call.heads, call.head_dim_v), attended
