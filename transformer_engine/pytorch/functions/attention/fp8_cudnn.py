"""FP8 attention by cuDNN's kernels: q, k and v are quantized first, and the output is dequantized if needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....common.kernels import launch
from ...primitives.attention.backends import cudnn_fp8
from ...primitives.attention.call import AttentionCall, AttentionInputs, Gradients
from ...runtime.device import current_hardware
from ...runtime.launching import run_program_into
from ...tensor.elements import float8_dtype
from ...tensor.float8_tensor import Float8TensorStorage
from ...tensor.quantized_tensor import QuantizedTensorStorage
from .fp8_attention import (
    OUTPUT,
    QKV,
    SOFTMAX_SCALE,
    FP8Attention,
    Rounded,
    dequantize_heads,
    launch_values,
    quantize_heads,
)

_CODE_NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


@functools.lru_cache(maxsize=64)
def _softmax_scales(device: torch.device) -> Tensor:
    """Return the softmax multiplier and its inverse, float32 [2]."""
    return torch.tensor([SOFTMAX_SCALE, 1.0 / SOFTMAX_SCALE], dtype=torch.float32, device=device)


def _softmax_addresses(device: torch.device) -> dict[str, int]:
    scales = _softmax_scales(device)
    return {"scale_s": scales.data_ptr(), "descale_s": scales.data_ptr() + scales.element_size()}


def forward(attention: FP8Attention, inputs: AttentionInputs) -> Rounded:
    """Compute o from q, k and v codes in FP8."""
    if (
        attention.state is not None
        and launch.unavailable_reason(current_hardware()) is None
        and not any(
            isinstance(x, QuantizedTensorStorage) or not x.is_contiguous() for x in inputs[:3]
        )
    ):
        return _forward_of_state(attention, inputs)
    call, quantizers = attention.call, attention.quantizers
    q, k, v = (_contiguous_codes(quantize_heads(x, quantizers.qkv)) for x in inputs[:3])
    quantizer: Any = quantizers.output
    # The kernel needs the output's multiplier before the output's maximum is known. Current scaling uses v's, because
    # |output| <= max |v|.
    scale_output = quantizer.scale if attention.scaling == "delayed" else v._scale_inv.reciprocal()
    descale_output = scale_output.reciprocal()
    scalars = {
        "descale_q": q._scale_inv.data_ptr(),
        "descale_k": k._scale_inv.data_ptr(),
        "descale_v": v._scale_inv.data_ptr(),
        "scale_output": scale_output.data_ptr(),
        **_softmax_addresses(scale_output.device),
    }
    done = cudnn_fp8.forward(
        call, _codes(call, q, k, v), inputs, scalars, float8_dtype(quantizer.dtype)
    )
    codes = _storage(done.output, descale_output, quantizer, call.dtype)
    if attention.scaling == "delayed":
        _record(attention, done.amax)
    output = None if attention.fp8_output else dequantize_heads(codes, call.dtype, call.heads)
    return Rounded(q, k, v, codes, output, done.lse)


def _contiguous_codes(storage: Any) -> Any:
    """Return the storage with contiguous codes."""
    return storage if storage._data.is_contiguous() else storage.mapped(Tensor.contiguous)


def _record(attention: FP8Attention, amax: Tensor) -> None:
    quantizers: Any = attention.quantizers
    quantizers.output.record(amax[:1])
    quantizers.softmax.record(amax[1:])


def _codes(call: AttentionCall, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes as tensors [.., heads, d] with an FP8 dtype."""
    return tuple(
        x._data.view(float8_dtype(x._fp8_dtype)).unflatten(-1, (heads, -1))
        for x, heads in ((q, call.heads), (k, call.groups), (v, call.groups))
    )


def _storage(
    codes: Tensor, descale: Tensor, quantizer: Any, dtype: torch.dtype
) -> Float8TensorStorage:
    """Return codes [.., heads, d] as the storage for [.., heads * d]."""
    data = codes.flatten(-2).view(torch.uint8)
    return Float8TensorStorage(data, descale, quantizer.dtype, quantizer=quantizer, dtype=dtype)


def _forward_of_state(attention: FP8Attention, inputs: AttentionInputs) -> Rounded:
    """Compute the forward pass with kernels that read scales from, and record amaxes in, the recipe's state."""
    from ....common.kernels import fp8_attention

    call, state = attention.call, attention.state
    quantizer: Any = attention.quantizers.qkv
    q, k, v = inputs.q, inputs.k, inputs.v
    device, code = q.device, float8_dtype(quantizer.dtype)
    scale, history = state.scale_in_place, state.amax_history
    sizes = (q.numel(), k.numel(), v.numel())
    record = fp8_attention.codes_of_three(sizes, (QKV, OUTPUT), _CODE_NAMES[code])
    codes = [torch.empty(x.shape, dtype=code, device=device) for x in (q, k, v)]
    descales = torch.empty(8, dtype=torch.float32, device=device)
    run_program_into(record, (q, k, v, scale, history, *codes, descales), device)
    of_input = descales.data_ptr()
    scalars = {
        "descale_q": of_input,
        "descale_k": of_input,
        "descale_v": of_input,
        "scale_output": scale.data_ptr() + scale.element_size() * OUTPUT,
        **_softmax_addresses(device),
    }
    done = cudnn_fp8.forward(call, codes, inputs, scalars, code)
    result = _storage(done.output, descales[4:5], attention.quantizers.output, call.dtype)
    output = None
    if attention.fp8_output:
        _record(attention, done.amax)
    else:
        output = launch_values(result, call.dtype, done.amax, history).unflatten(
            -1, (call.heads, -1)
        )
    inverse = descales[:1]
    of_inputs = (_storage(x, inverse, quantizer, call.dtype) for x in codes)
    return Rounded(*of_inputs, result, output, done.lse)  # pyright: ignore[reportCallIssue]


def backward(
    attention: FP8Attention, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor
) -> Gradients:
    """Compute dq, dk and dv in FP8 with delayed-scaling scales."""
    call = attention.call
    quantizers: Any = attention.quantizers
    q: Any = rounded.q
    k: Any = rounded.k
    v: Any = rounded.v
    codes: Any = rounded.codes
    grad: Any = _contiguous_codes(quantize_heads(grad_output, quantizers.grad_output))
    scale_dp, scale_grad = quantizers.grad_softmax.scale, quantizers.grad_qkv.scale
    descale_dp = scale_dp.reciprocal()
    scalars = {
        "descale_q": q._scale_inv.data_ptr(),
        "descale_k": k._scale_inv.data_ptr(),
        "descale_v": v._scale_inv.data_ptr(),
        **_softmax_addresses(scale_dp.device),
        "descale_output": codes._scale_inv.data_ptr(),
        "descale_grad_output": grad._scale_inv.data_ptr(),
        "scale_dp": scale_dp.data_ptr(),
        "descale_dp": descale_dp.data_ptr(),
        **{f"scale_{role}": scale_grad.data_ptr() for role in ("grad_q", "grad_k", "grad_v")},
    }
    shape = (call.heads, -1)
    output = codes._data.view(float8_dtype(codes._fp8_dtype)).unflatten(-1, shape)
    grad_codes = grad._data.view(float8_dtype(grad._fp8_dtype)).unflatten(-1, shape)
    assert rounded.lse is not None
    done = cudnn_fp8.backward(
        call,
        _codes(call, q, k, v),
        output,
        grad_codes,
        rounded.lse,
        inputs,
        scalars,
        float8_dtype(quantizers.grad_qkv.dtype),
    )
    quantizers.grad_qkv.record(done.amax[:3].amax(0, keepdim=True))
    quantizers.grad_softmax.record(done.amax[3:])
    inverse = scale_grad.reciprocal()
    found = (
        dequantize_heads(_storage(x, inverse, quantizers.grad_qkv, call.dtype), call.dtype, heads)
        for x, heads in ((done.q, call.heads), (done.k, call.groups), (done.v, call.groups))
    )
    return Gradients(*found)
