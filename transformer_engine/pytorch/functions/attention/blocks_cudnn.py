"""MXFP8 attention by cuDNN's kernels: q, k, v and the output gradient are quantized in the contracted axes.

The backward pass quantizes the saved values again: its products contract other axes than the forward pass.
"""

from __future__ import annotations

from torch import Tensor

from ...primitives.attention.backends import cudnn_blocks
from ...primitives.attention.backends.cudnn_blocks import BlockCodes
from ...primitives.attention.call import AttentionInputs, Gradients
from ...primitives.operand import Operand
from ...primitives.quantize import dequantize
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ...tensor.quantizer import Quantizer
from .fp8_attention import FP8Attention, Rounded


def _quantize_directions(
    x: Tensor, tensor_format: str, quantizer: Quantizer, along_depth: bool, along_tokens: bool
) -> tuple[BlockCodes | None, BlockCodes | None]:
    """Quantize x [.., h, d] with blocks along d and along the tokens, where requested."""
    matrix = cudnn_blocks.as_matrix_of_tokens(x, tensor_format)
    operands = quantizer.operands(matrix, along_depth, along_tokens)
    results: list[BlockCodes | None] = []
    for operand, contracts_tokens in zip(operands, (False, True), strict=True):
        assert operand is None or isinstance(operand, Operand)
        results.append(
            None
            if operand is None
            else cudnn_blocks.block_codes(operand, x.shape, tensor_format, contracts_tokens)
        )
    return results[0], results[1]


def _values(attention: FP8Attention, inputs: AttentionInputs) -> list[Tensor]:
    """q, k and v in the call's dtype."""
    dtype = attention.call.dtype
    return [x.decode(dtype) if isinstance(x, QuantizedTensorStorage) else x for x in inputs[:3]]


def quantized_values(attention: FP8Attention, inputs: AttentionInputs) -> list[Tensor]:
    """Return q, k and v in the call's dtype, rounded to the codes that the forward pass reads."""
    formats = (attention.call.q_format, attention.call.kv_format, attention.call.kv_format)
    quantizer, rounded = attention.quantizers.qkv, []
    for x, tensor_format, along_tokens in zip(
        _values(attention, inputs), formats, (False, False, True), strict=True
    ):
        matrix = cudnn_blocks.as_matrix_of_tokens(x, tensor_format)
        operands = quantizer.operands(matrix, not along_tokens, along_tokens)
        operand = operands[along_tokens]
        assert isinstance(operand, Operand)
        values = dequantize(operand)
        rounded.append((values.t() if along_tokens else values).reshape(x.shape))
    return rounded


def forward(attention: FP8Attention, inputs: AttentionInputs) -> Rounded:
    """Compute o in 16 bits from MXFP8 codes for q, k and v."""
    call, quantizers = attention.call, attention.quantizers
    q, k, v = _values(attention, inputs)
    q_codes, _ = _quantize_directions(q, call.q_format, quantizers.qkv, True, False)
    k_codes, _ = _quantize_directions(k, call.kv_format, quantizers.qkv, True, False)
    _, v_codes = _quantize_directions(v, call.kv_format, quantizers.qkv, False, True)
    assert q_codes is not None and k_codes is not None and v_codes is not None
    output, lse = cudnn_blocks.forward(call, q_codes, k_codes, v_codes)
    codes = (
        quantizers.output.encode(output.flatten(-2), True, False) if attention.fp8_output else None
    )
    return Rounded(None, None, None, codes, output, lse)


def backward(
    attention: FP8Attention, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor
) -> Gradients:
    """Compute dq, dk and dv in 16 bits from MXFP8 codes for q, k, v and the output gradient."""
    call, quantizers = attention.call, attention.quantizers
    q, k, v = _values(attention, inputs)
    grad_output = grad_output.contiguous()
    of_q, of_qkv = call.q_format, quantizers.qkv
    quantized = {
        ("q", "q_t"): _quantize_directions(q, of_q, of_qkv, True, True),
        ("k", "k_t"): _quantize_directions(k, call.kv_format, of_qkv, True, True),
        ("v", ""): _quantize_directions(v, call.kv_format, of_qkv, True, False),
        ("grad_output_codes", "grad_output_t"): _quantize_directions(
            grad_output, of_q, quantizers.grad_output, True, True
        ),
    }
    codes = {
        role: one
        for roles, directions in quantized.items()
        for role, one in zip(roles, directions, strict=True)
        if one is not None
    }
    assert rounded.output is not None and rounded.lse is not None
    return cudnn_blocks.backward(call, codes, rounded.output.contiguous(), grad_output, rounded.lse)
