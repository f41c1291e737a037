"""Functions of the steps that only sequences of operations contribute; see `common/passes/vocabulary.py`.

They join the table of `functions/steps.py`, so that its executor runs passes of layers and of sequences alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.passes.vocabulary import Dropout, Named
from ..functions.caller_buffers import handed_out
from ..functions.stacks import members_of, stacked_gradient
from ..functions.steps import OPERATIONS, leading_shape
from ..primitives.dropout import draw_seed, dropout_backward, dropout_forward
from ..primitives.gemm import as_matrix
from ..runtime.symbols import Symbol
from ..runtime.tracing import result_in
from ..tensor.quantized_tensor import QuantizedTensorStorage

Shape = tuple[int, ...]


def _unflatten(env: Any, s: None, y: Tensor, leading: Shape) -> tuple[Tensor]:
    shape = (*leading_shape(leading, y.shape[0]), y.shape[-1])
    return (y.view(shape) if type(y) is Symbol else result_in(y, shape),)


def _row_scale(env: Any, s: None, y: Tensor, scales: Tensor) -> tuple[Tensor]:
    """Multiplied in float32: scales are often kept in a wider dtype than activations."""
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


def _dropout(env: Any, s: Dropout, x: Tensor) -> tuple[Tensor, Tensor]:
    p = env.objects[s.dropout, "p"]
    return dropout_forward(x, p, seed=draw_seed(x.device))


def _split(env: Any, count: int, x: Tensor, rows: Shape) -> tuple[Tensor, ...]:
    total = sum(rows)
    return tuple((x if total == x.shape[0] else x[:total]).split(rows))


def _concatenate(env: Any, s: None, x: Tensor, *matrices: Tensor) -> tuple[Tensor]:
    """Concatenate the results of groups of x; rows of x that belong to no group give zeros."""
    rest = x.shape[0] - sum([matrix.shape[0] for matrix in matrices])
    if rest:
        matrices = (*matrices, matrices[0].new_zeros(rest, matrices[0].shape[1]))
    return (torch.cat(matrices),)


def _concatenate_into(env: Any, s: Named, x: Tensor, *matrices: Tensor) -> tuple[Tensor]:
    buffer = env.objects[s.operation, s.slot]
    made = _concatenate(env, None, x, *matrices)[0]
    buffer.copy_(made)
    return (handed_out(buffer),)


def _add_scaled_bias(env: Any, s: None, y: Tensor, bias: Tensor, scales: Tensor) -> tuple[Tensor]:
    return ((y.float() + scales.reshape(-1, 1).float() * bias.float()).to(y.dtype),)


def _scaled_bias_backward(
    env: Any, dtype: torch.dtype, dy: Tensor, bias: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of the bias [N], gradient of the scales [M, 1])"""
    wide = dy.float()
    grad_bias = (wide * scales.reshape(-1, 1).float()).sum(0).to(dtype)
    return grad_bias, (wide @ bias.float()).to(scales.dtype).unsqueeze(1)


OPERATIONS.update(
    {
        "leading": lambda env, s, x: (tuple(x.shape[:-1]),),
        "shape": lambda env, s, x: (tuple(x.shape),),
        "rows": lambda env, width, x: (as_matrix(x) if width is None else x.reshape(-1, width),),
        "unflatten": _unflatten,
        "reshape": lambda env, s, x, shape: (x.reshape(shape),),
        "to_shape": lambda env, shape, x: (x.reshape(shape),),
        "to_dtype": lambda env, dtype, x: (x.to(dtype),),
        "alias": lambda env, s, x: (x.detach(),),
        "values": lambda env, s, x: (x.dequantize() if isinstance(x, QuantizedTensorStorage) else x,),
        "quantize_values": lambda env, s, x: (env.objects[s.operation, s.slot].quantize(x),),
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
        "split_sizes": lambda env, s, x: (env.objects[s.operation, s.slot],),
        "split": _split,
        "concatenate": _concatenate,
        "concatenate_into": _concatenate_into,
        "copy": lambda env, s, x: (x.clone(),),
        "unbind": lambda env, count, x: tuple(members_of(x)),
        "stack": lambda env, s, *members: (stacked_gradient(members, env.objects[s.operation, s.slot]),),
        "add_scaled_bias": _add_scaled_bias,
        "scaled_bias_backward": _scaled_bias_backward,
    }
)
