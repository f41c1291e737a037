"""Functions of the steps that only sequences of operations contribute; see `common/passes/vocabulary.py`.

They join the table of `functions/steps.py`; `functions/grouped_steps.py` adds the steps over groups of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.passes.vocabulary import DropoutSettings, Layer, Named
from ..fast.symbols import Symbol
from ..functions.caller_buffers import handed_out
from ..functions.grouped_call import GroupedCall, members_of, stacked_gradient
from ..functions.grouped_operators import backward_in_graph, forward_in_graph
from ..functions.grouped_steps import OPERATIONS
from ..functions.sequence import leading_shape
from ..functions.weight_gradient import WeightGradient
from ..primitives.dropout import draw_seed, dropout_backward, dropout_forward
from ..primitives.gemm import as_matrix
from ..runtime.tracing import result_in
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage, plain_values
from .links import summed_values

Shape = tuple[int, ...]


def _unflatten(env: Any, s: None, y: Tensor, leading: Shape) -> tuple[Tensor]:
    shape = (*leading_shape(leading, y.shape[0]), y.shape[-1])
    return (y.view(shape) if type(y) is Symbol else result_in(y, shape),)


def _row_scale(env: Any, s: None, y: Tensor, scales: Tensor) -> tuple[Tensor]:
    """Multiply in float32: scales often have a wider dtype than activations."""
    return ((y.float() * scales.reshape(-1, 1).float()).to(y.dtype),)


def _row_scale_backward(env: Any, s: None, dy: Tensor, y: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    wide = dy.float()
    grad_scales = (wide * y.float()).sum(-1).to(scales.dtype).view(scales.shape)
    return (wide * scales.reshape(-1, 1).float()).to(dy.dtype), grad_scales


def _block_order(env: Any, blocks: Shape, x: Tensor) -> tuple[Tensor]:
    """Swap the first two of the three dimensions (-1 once) that the last dimension is split into."""
    ordered = x.unflatten(-1, blocks).transpose(-3, -2)
    return (ordered.reshape(x.shape),)


def _l2_norm(env: Any, eps: float, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstdev = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * rstdev).to(x.dtype), rstdev


def _l2_norm_backward(env: Any, s: None, dy: Tensor, x: Tensor, rstdev: Tensor) -> tuple[Tensor]:
    """dx = rstdev * (dy - x * rstdev^2 * sum(dy * x))"""
    wide, gradient = x.float(), dy.float()
    along = (gradient * wide).sum(-1, keepdim=True)
    return ((rstdev * (gradient - wide * rstdev.square() * along)).to(dy.dtype),)


def _situ_glu(env: Any, constants: tuple[float, float], x: Tensor) -> tuple[Tensor]:
    """y = beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) of x = [a, b], in float32."""
    beta1, beta2 = constants
    a, b = x.float().chunk(2, dim=-1)
    gate = beta1 * torch.tanh(a / beta1) * torch.sigmoid(a)
    return ((gate * beta2 * torch.tanh(b / beta2)).to(x.dtype),)


def _situ_glu_backward(env: Any, constants: tuple[float, float], dy: Tensor, x: Tensor) -> tuple[Tensor]:
    beta1, beta2 = constants
    wide = dy.float()
    a, b = x.float().chunk(2, dim=-1)
    tanh_a, tanh_b, sigmoid = torch.tanh(a / beta1), torch.tanh(b / beta2), torch.sigmoid(a)
    gate, linear = beta1 * tanh_a * sigmoid, beta2 * tanh_b
    gate_slope = (1 - tanh_a.square()) * sigmoid + beta1 * tanh_a * sigmoid * (1 - sigmoid)
    da, db = wide * linear * gate_slope, wide * gate * (1 - tanh_b.square())
    return (torch.cat((da, db), dim=-1).to(dy.dtype),)


def _dropout(env: Any, s: DropoutSettings, x: Tensor) -> tuple[Tensor, Tensor]:
    p = env.objects[s.dropout, "p"]
    return dropout_forward(x, p, seed=draw_seed(x.device))


def _copy_into(env: Any, s: Named, x: Tensor) -> tuple[Tensor]:
    buffer = env.objects[s.operation, s.slot]
    buffer.copy_(x)
    return (handed_out(buffer),)


def _scaled_bias(env: Any, s: Layer, y: Tensor, biases: Any, scales: Tensor) -> tuple[Tensor]:
    """y + scales * bias of each group, in float32."""
    call: GroupedCall = env.linears[s.layer]
    parts = zip(call.rows_of(y), members_of(biases), call.rows_of(scales), strict=True)
    return (
        call.joined([(part.float() + rows.float() * bias.float()).to(y.dtype) for part, bias, rows in parts]),
    )


def _scaled_bias_backward(env: Any, s: Layer, dy: Tensor, biases: Any, scales: Tensor) -> tuple[Any, Tensor]:
    """Return (gradients of the biases [N], gradient of the scales [M, 1])."""
    call: GroupedCall = env.linears[s.layer]
    grads, grad_scales = [], []
    for part, bias, rows in zip(call.rows_of(dy), members_of(biases), call.rows_of(scales), strict=True):
        wide = part.float()
        grads.append((wide * rows.float()).sum(0).to(env.dtypes[s.layer][1]))
        grad_scales.append((wide @ bias.float()).to(scales.dtype).unsqueeze(1))
    of_biases = stacked_gradient(grads, WeightGradient()) if call.spec.stacked_bias else grads
    return of_biases, call.joined(grad_scales)


def _grouped_operator(env: Any, s: Named, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    key, rows, states, _ = env.objects[s.operation, s.slot]
    y, scales = forward_in_graph(key, x, tensors[rows], tensors, states)
    return (y, *scales)


def _grouped_operator_backward(env: Any, s: Named, dy: Tensor, x: Tensor, *others: Tensor) -> tuple[Any, ...]:
    key, rows, of_forward, states = env.objects[s.operation, s.slot]
    count = len(others) - len(of_forward)
    saved = dy, x, others[rows], others[:count]
    return tuple(backward_in_graph(key, saved, others[count:], states))


OPERATIONS.update(
    {
        "leading": lambda env, s, x: (tuple(x.shape[:-1]),),
        "shape": lambda env, s, x: (tuple(x.shape),),
        "rows": lambda env, width, x: (as_matrix(x) if width is None else x.reshape(-1, width),),
        "unflatten": _unflatten,
        "reshape": lambda env, s, x, shape: (
            (x if isinstance(x, Tensor) else plain_values(x)).reshape(shape),
        ),
        "to_shape": lambda env, shape, x: (x.reshape(shape),),
        "to_dtype": lambda env, dtype, x: (x.to(dtype),),
        "alias": lambda env, s, x: (x.detach(),),
        "values": lambda env, s, x: (plain_values(x),),
        "quantize_values": lambda env, s, x: (
            x if isinstance(x, QuantizedTensorStorage) else env.objects[s.operation, s.slot].quantize(x),
        ),
        "constant_scale": lambda env, constant, x: (x * constant,),
        "row_scale": _row_scale,
        "row_scale_backward": _row_scale_backward,
        "block_order": _block_order,
        "l2_norm": _l2_norm,
        "l2_norm_backward": _l2_norm_backward,
        "situ_glu": _situ_glu,
        "situ_glu_backward": _situ_glu_backward,
        "dropout": _dropout,
        "dropout_backward": lambda env, s, dy, mask: (
            dropout_backward(dy, mask, env.objects[s.dropout, "p"]),
        ),
        "sum_values": lambda env, s, a, b: (summed_values(a, b),),
        "copy": lambda env, s, x: (x.clone(memory_format=torch.contiguous_format),),
        "members": lambda env, s, *members: (list(members),),
        "separate": lambda env, s, members: tuple(members),
        "copy_into": _copy_into,
        "grouped_scaled_bias": _scaled_bias,
        "grouped_scaled_bias_backward": _scaled_bias_backward,
        "grouped_operator": _grouped_operator,
        "grouped_operator_backward": _grouped_operator_backward,
    }
)
