"""FP8 attention by cuDNN's kernels: a cast of q, k and v before, a cast of the result back where values are wanted."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....common.kernels import launch
from ...primitives.attention.backends import cudnn_fp8
from ...primitives.attention.request import AttentionInputs, Gradients
from ...runtime.launching import run_into
from ...tensor.elements import float8_dtype
from ...tensor.float8_tensor import Float8TensorStorage
from ...tensor.quantized_tensor import QuantizedTensorStorage
from .fp8_call import OUTPUT, QKV, SOFTMAX_SCALE, Call, Rounded, codes_of, started_values, values_of

_CODE_NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


@functools.lru_cache(maxsize=64)
def _softmax_scales(device: torch.device) -> Tensor:
    """The scale of the softmax and its inverse, float32 [2]."""
    return torch.tensor([SOFTMAX_SCALE, 1.0 / SOFTMAX_SCALE], dtype=torch.float32, device=device)


def _softmax_addresses(device: torch.device) -> dict[str, int]:
    scales = _softmax_scales(device)
    return {"scale_s": scales.data_ptr(), "descale_s": scales.data_ptr() + scales.element_size()}


def forward(call: Call, inputs: AttentionInputs) -> Rounded:
    """o of the codes of q, k and v, computed in FP8."""
    if call.state is not None and _plain(inputs):
        return _forward_of_state(call, inputs)
    r, slots = call.request, call.slots
    q, k, v = (_aligned(codes_of(x, slots.qkv)) for x in inputs[:3])
    scale_output = _scale_of_output(call, v)
    descale_output = scale_output.reciprocal()
    scalars = {
        "descale_q": _address(q._scale_inv),
        "descale_k": _address(k._scale_inv),
        "descale_v": _address(v._scale_inv),
        "scale_output": _address(scale_output),
        **_softmax_addresses(scale_output.device),
    }
    quantizer: Any = slots.output
    done = cudnn_fp8.forward(r, _codes(call, q, k, v), inputs, scalars, float8_dtype(quantizer.dtype))
    codes = _storage(done.output, descale_output, quantizer, r.shape.dtype)
    if call.scaling == "delayed":
        _record(call, done.amax)
    output = values_of(codes, r.shape.dtype, r.shape.heads) if call.wants_values else None
    return Rounded(q, k, v, codes, output, done.lse, None, None)


def _plain(inputs: AttentionInputs) -> bool:
    """Are q, k and v three contiguous 16-bit tensors?"""
    for x in inputs[:3]:
        if isinstance(x, QuantizedTensorStorage) or not x.is_contiguous():
            return False
    return launch.missing() is None


def _aligned(storage: Any) -> Any:
    """The storage with contiguous codes."""
    return storage if storage._data.is_contiguous() else storage.mapped(Tensor.contiguous)


def _scale_of_output(call: Call, v: Any) -> Tensor:
    """The scale of the output before it is known; without a state, that of v, whose means the outputs are."""
    quantizer: Any = call.slots.output
    return quantizer.scale if call.scaling == "delayed" else v._scale_inv.reciprocal()


def _record(call: Call, amax: Tensor) -> None:
    slots: Any = call.slots
    slots.output.record(amax[:1])
    slots.softmax.record(amax[1:])


def _address(x: Tensor) -> int:
    return x.data_ptr()


def _codes(call: Call, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The codes as tensors [.., heads, d] of an FP8 dtype."""
    r = call.request
    return tuple(  # pyright: ignore[reportReturnType]
        x._data.view(float8_dtype(x._fp8_dtype)).unflatten(-1, (heads, -1))
        for x, heads in ((q, r.shape.heads), (k, r.shape.groups), (v, r.shape.groups))
    )


def _storage(codes: Tensor, descale: Tensor, quantizer: Any, dtype: torch.dtype) -> Float8TensorStorage:
    """Codes [.., heads, d] as the storage of [.., heads * d]."""
    data = codes.flatten(-2).view(torch.uint8)
    return Float8TensorStorage(data, descale, quantizer.dtype, quantizer=quantizer, dtype=dtype)


def _forward_of_state(call: Call, inputs: AttentionInputs) -> Rounded:
    """The same in three launches: scales and amaxes are read and written in the recipe's state itself."""
    from ....common.kernels import fp8_attention

    r, state = call.request, call.state
    quantizer: Any = call.slots.qkv
    q, k, v = inputs.q, inputs.k, inputs.v
    device, code = q.device, float8_dtype(quantizer.dtype)
    scale, history = state.scale_in_place, state.amax_history
    sizes = (q.numel(), k.numel(), v.numel())
    record = fp8_attention.codes_of_three(sizes, (QKV, OUTPUT), _CODE_NAMES[code])
    codes = [torch.empty(x.shape, dtype=code, device=device) for x in (q, k, v)]
    descales = torch.empty(8, dtype=torch.float32, device=device)
    run_into(record, (q, k, v, scale, history, *codes, descales), device)
    of_input = descales.data_ptr()
    scalars = {
        "descale_q": of_input,
        "descale_k": of_input,
        "descale_v": of_input,
        "scale_output": scale.data_ptr() + scale.element_size() * OUTPUT,
        **_softmax_addresses(device),
    }
    done = cudnn_fp8.forward(r, codes, inputs, scalars, code)
    result = _storage(done.output, descales[4:5], call.slots.output, r.shape.dtype)
    output = None
    if call.wants_values:
        output = started_values(result, r.shape.dtype, done.amax, history).unflatten(-1, (r.shape.heads, -1))
    else:
        _record(call, done.amax)
    inverse = descales[:1]
    of_inputs = (_storage(x, inverse, quantizer, r.shape.dtype) for x in codes)
    return Rounded(*of_inputs, result, output, done.lse, None, None)  # pyright: ignore[reportCallIssue]


def backward(call: Call, inputs: AttentionInputs, rounded: Rounded, grad_output: Tensor) -> Gradients:
    """dq, dk and dv computed in FP8 with the scales of delayed scaling."""
    r = call.request
    slots: Any = call.slots
    q: Any = rounded.q
    k: Any = rounded.k
    v: Any = rounded.v
    codes: Any = rounded.codes
    grad: Any = _aligned(codes_of(grad_output, slots.grad_output))
    scale_dp, scale_grad = slots.grad_softmax.scale, slots.grad_qkv.scale
    descale_dp = scale_dp.reciprocal()
    scalars = {
        "descale_q": _address(q._scale_inv),
        "descale_k": _address(k._scale_inv),
        "descale_v": _address(v._scale_inv),
        **_softmax_addresses(scale_dp.device),
        "descale_output": _address(codes._scale_inv),
        "descale_grad_output": _address(grad._scale_inv),
        "scale_dp": _address(scale_dp),
        "descale_dp": _address(descale_dp),
        **{f"scale_{role}": _address(scale_grad) for role in ("grad_q", "grad_k", "grad_v")},
    }
    shape = (r.shape.heads, -1)
    output = codes._data.view(float8_dtype(codes._fp8_dtype)).unflatten(-1, shape)
    grad_codes = grad._data.view(float8_dtype(grad._fp8_dtype)).unflatten(-1, shape)
    assert rounded.lse is not None
    done = cudnn_fp8.backward(
        r,
        _codes(call, q, k, v),
        output,
        grad_codes,
        rounded.lse,
        inputs,
        scalars,
        float8_dtype(slots.grad_qkv.dtype),
    )
    slots.grad_qkv.record(done.amax[:3].amax(0, keepdim=True))
    slots.grad_softmax.record(done.amax[3:])
    inverse = scale_grad.reciprocal()
    found = (
        values_of(_storage(x, inverse, slots.grad_qkv, r.shape.dtype), r.shape.dtype, heads)
        for x, heads in ((done.q, r.shape.heads), (done.k, r.shape.groups), (done.v, r.shape.groups))
    )
    return Gradients(*found)
