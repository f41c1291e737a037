"""One FP8 attention as data: its quantizers, what a forward pass leaves, and q, k, v as codes and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.kernels import launch
from ...primitives.attention.passes import Passes
from ...primitives.attention.request import AttentionRequest
from ...runtime.launching import run_into
from ...tensor.elements import float8_dtype
from ...tensor.float8_tensor import Float8TensorStorage
from ...tensor.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, storage_of
from ...tensor.quantizer import Quantizer

# Columns of the forward state's tensors that checkpoints keep for (q, k, v), o and the softmax. Those of dqkv, do and
# dp in the backward state are 0, 3 and 5.
QKV, OUTPUT, SOFTMAX = 2, 3, 8

# What multiplies the softmax before it is rounded. Kernels round its numerators exp(s - max s), which are at most 1,
# but report the largest probability: the scale made from that would saturate them.
SOFTMAX_SCALE = 256.0

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Slots(NamedTuple):
    """The quantizers of an attention."""

    qkv: Quantizer
    output: Quantizer
    softmax: Quantizer
    grad_qkv: Quantizer
    grad_output: Quantizer
    grad_softmax: Quantizer

    @classmethod
    def of(cls, qkv: Any, output: Any, softmax: Any) -> Slots:
        """Those of the three products of a recipe state: see `fp8`."""
        return cls(
            qkv.output, output.input, softmax.output, qkv.grad_output, output.grad_input, softmax.grad_input
        )


class Call(NamedTuple):
    """One FP8 attention.

    scaling        "delayed", "current" or "block"
    state          the delayed-scaling state of the forward pass, where kernels may read and write it themselves
    passes         the attention in the request's own dtype, for emulation and the high-precision backward
    wants_values   the output is needed in the request's dtype, not as codes alone
    """

    request: AttentionRequest
    scaling: str
    slots: Slots
    state: Any
    passes: Passes
    wants_values: bool


class Rounded(NamedTuple):
    """What a forward pass leaves: q, k, v as codes, o [.., h, d_v] as values and as codes, its statistics."""

    q: QuantizedTensorStorage
    k: QuantizedTensorStorage
    v: QuantizedTensorStorage
    codes: QuantizedTensorStorage
    output: Tensor | None
    lse: Tensor | None
    rng_state: Tensor | None
    max_logit: Tensor | None


def codes_of(x: Tensor, quantizer: Quantizer) -> QuantizedTensorStorage:
    """x [.., h, d] as codes [.., h * d]; a tensor that comes as codes is taken as it is."""
    if isinstance(x, QuantizedTensor):
        storage = storage_of(x)
        flat = storage.viewed((*x.shape[:-2], x.shape[-2] * x.shape[-1]))
        if flat is not None:
            return flat
        x = storage.decode(x.dtype)
    return quantizer.encode(x.flatten(-2), True, False)


def values_of(storage: QuantizedTensorStorage, dtype: torch.dtype, heads: int) -> Tensor:
    """The values [.., h, d] of codes [.., h * d]."""
    if isinstance(storage, Float8TensorStorage) and can_start_on(storage._data):
        return started_values(storage, dtype, None, None).unflatten(-1, (heads, -1))
    return storage.decode(dtype).unflatten(-1, (heads, -1))


def can_start_on(codes: Tensor | None) -> bool:
    """Can a Triton kernel read these codes?"""
    if codes is None or not codes.is_cuda or torch.compiler.is_compiling():
        return False
    return launch.missing() is None and codes.is_contiguous() and codes.numel() > 0


def started_values(
    storage: Float8TensorStorage, dtype: torch.dtype, amax: Tensor | None, history: Tensor | None
) -> Tensor:
    """Values of codes in one launch, which also records amax [2] (of output and softmax) in row 0 of a history."""
    from ....common.kernels import fp8_attention

    data = storage._data
    assert data is not None
    record = fp8_attention.values_of(data.numel(), (SOFTMAX, OUTPUT), _NAMES[dtype])
    values = torch.empty(data.shape, dtype=dtype, device=data.device)
    codes = data.view(float8_dtype(storage._fp8_dtype))
    run_into(record, (codes, storage._scale_inv, amax, history, values), data.device)
    return values
