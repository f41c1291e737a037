"""Backends that allocate what a GPU's backends allocate, and compute nothing: for runs on fake tensors.

Inside `planning` every operation goes to them, whatever the device. An operation without one here goes to its
reference, whose intermediate tensors are larger than a kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..common.dispatch import Backend, observing, tables
from ..common.kernels import launch
from .attention import DotProductAttention
from .double_backward import once_differentiable
from .functions import weight_gradient
from .primitives.activation import ACTIVATIONS, gradient_fuses
from .primitives.fused_codes import in_row_blocks
from .primitives.gemm import Epilogue, composed, cublaslt_library
from .primitives.gemm.fused_request import CODES, GELU, GELU_GRADIENT, FusedRequest
from .primitives.norm import triton as norm
from .primitives.operand import Operand
from .primitives.quantize import Cast, Quantized, QuantizeSpec
from .quantization import delayed_scaling
from .quantization.autocast import reinstate, snapshot
from .tensor.allocation import empty_quantized


@contextmanager
def planning(quantized: Callable[[Tensor, Quantized], None]) -> Iterator[None]:
    """Run operations without computing; quantized(x, result) hears of every quantization.

    State that modules share outside of themselves is set aside, so that nothing of the run stays in it.
    """

    def planned_quantize(x: Tensor, spec: QuantizeSpec, *rest: Any) -> Quantized:
        result = _codes(x.shape[0], x.shape[1], spec, x.device)
        quantized(x, result)
        return result

    before = {name: dict(vars(table)) for name, table in tables.items()}
    pools, moment = delayed_scaling._registry.pools, snapshot()
    dummies = dict(weight_gradient._dummies)
    runs = {"quantize": planned_quantize, **_RUNS}
    for name, table in tables.items():
        if name == "precision":
            continue  # it decides and computes nothing
        planned = Backend("planned", runs[name], _takes_all) if name in runs else table.backends[-1]
        vars(table).update(backends=(planned,), order=None)
    delayed_scaling._registry.pools = {}
    weight_gradient._dummies.clear()
    try:
        # An observer keeps operations from the choices that they remember.
        with observing(_ignored):
            yield
    finally:
        for name, attributes in before.items():
            vars(tables[name]).update(attributes)
        delayed_scaling._registry.pools = pools
        weight_gradient._dummies.clear()
        weight_gradient._dummies.update(dummies)
        reinstate(moment)


def _takes_all(request: Any) -> None:
    return None


def _ignored(operation: str, request: Any) -> None:
    return None


def _codes(rows: int, depth: int, spec: QuantizeSpec, device: torch.device) -> Quantized:
    result = empty_quantized(spec, rows, depth, device)
    if spec.format.block is None:
        return result._replace(amax=torch.empty(1, dtype=torch.float32, device=device))
    both_alike = spec.transposes or not spec.hadamard
    return result._replace(amax_t=result.amax) if spec.rowwise and spec.columnwise and both_alike else result


def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


def _gemm(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    if epilogue.out is not None:
        return epilogue.out
    return a.codes.new_empty((a.rows, b.rows), dtype=epilogue.dtype)


def _gemm_epilogue(request: FusedRequest) -> Callable[..., Any]:
    """One call where cuBLASLt would be asked, else the product and what follows it."""
    product = request.product
    asked = product.device == "cuda" and product.capability >= (8, 0) and cublaslt_library.missing() is None
    widths = {GELU: (1, 2), GELU_GRADIENT: (2,), CODES: (1,)}[request.kind]  # bytes of an operand's element
    fuses = asked and product.a_element.itemsize in widths and product.dtype.itemsize == 2
    if not fuses:
        return composed.run(request)

    def planned(a: Operand, b: Operand, epilogue: Epilogue, *rest: Any) -> Any:
        if request.kind == CODES:
            assert request.dtype is not None
            return _gemm(a, b, epilogue._replace(dtype=request.dtype))
        out = _gemm(a, b, epilogue)
        if request.kind == GELU:
            return out, torch.empty_like(out) if request.second else None
        return out

    return planned


def _norm(operation: str) -> Callable[..., Any]:
    return _NORMS[operation]


def _layernorm_forward(
    x: Tensor, weight: Tensor, bias: Any, eps: float, zero_centered: bool, cast: Cast | None = None
) -> tuple[Tensor | Quantized, Tensor, Tensor]:
    return _normalized(x, cast), _statistics(x), _statistics(x)


def _rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    return _normalized(x, cast), _statistics(x)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _normalized(x: Tensor, cast: Cast | None) -> Tensor | Quantized:
    return torch.empty_like(x) if cast is None else _cast(x, x.shape[1], cast, in_row_blocks(cast.spec))


def _cast(x: Tensor, width: int, cast: Cast, fuses: bool = True) -> Quantized:
    """Codes of a result [M, width], stored first where one scale is to be made of it, or a cast in blocks follows."""
    stored = not fuses if cast.spec.format.block is not None else cast.multiplier is None
    result = x.new_empty(x.shape[0], width) if stored else None
    codes = _codes(x.shape[0], width, cast.spec, x.device)
    del result  # there until the codes are, for the kernel that reads it
    return codes


def _layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    partial_sums = _partial_sums(dy, x, weight, True)
    results = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    del partial_sums  # there until the results are
    return results


def _rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    partial_sums = _partial_sums(dy, x, weight, False)
    results = torch.empty_like(x), torch.empty_like(weight)
    del partial_sums
    return results


def _partial_sums(dy: Tensor, x: Tensor, weight: Tensor, centered: bool) -> Tensor | None:
    """What a GPU's kernels sum columns in, as their program says."""
    if x.device.type != "cuda" or launch.missing() is not None or not x.shape[0]:
        return None
    bytes_a_column = dy.element_size() + x.element_size()
    strides, dtypes = (dy.stride(0), x.stride(0), 0), (x.dtype, weight.dtype)
    program = norm.backward_program(x.shape, strides, dtypes, False, centered, bytes_a_column, x.device.index)
    made = {
        name: output
        for step in program.steps
        for name, output in zip(step.outputs, step.launch.outputs, strict=True)
    }
    workspace = made["workspace"]
    assert workspace is not None and workspace.shape is not None
    return x.new_empty(workspace.shape, dtype=torch.float32)


_NORMS: dict[str, Callable[..., Any]] = {
    "layernorm_forward": _layernorm_forward,
    "layernorm_backward": _layernorm_backward,
    "rmsnorm_forward": _rmsnorm_forward,
    "rmsnorm_backward": _rmsnorm_backward,
}


def _activation(operation: str) -> Callable[..., Any]:
    return _ACTIVATIONS[operation]


def _activation_width(name: str, x: Tensor) -> int:
    return x.shape[-1] // 2 if ACTIVATIONS[name].gated else x.shape[-1]


def _activation_forward(name: str, x: Tensor, params: Any, cast: Cast | None = None) -> Tensor | Quantized:
    width = _activation_width(name, x)
    return x.new_empty((*x.shape[:-1], width)) if cast is None else _cast(x, width, cast)


def _activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    params: Any,
    cast: Cast | None = None,
    dbias: torch.dtype | None = None,
) -> Tensor | tuple[Quantized, Tensor | None]:
    if cast is None:
        return torch.empty_like(x)
    sums = None if dbias is None else x.new_empty(x.shape[1], dtype=dbias)
    whole = not ACTIVATIONS[name].gated or x.shape[1] % 256 == 0
    return _cast(x, x.shape[1], cast, whole and gradient_fuses(cast.spec, dbias is not None)), sums


_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "forward": _activation_forward,
    "backward": _activation_backward,
}


def _rope(operation: str) -> Callable[..., Any]:
    return _ROPES[operation]


def _rotated(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _rotated_parts(
    qkv: Tensor, q_angles: Tensor, k_angles: Tensor, positions: Any, sizes: tuple[int, int, int], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query, size, value = sizes
    groups = qkv.shape[-2]
    return (
        qkv.new_empty((*qkv.shape[:-2], groups * query // size, size)),
        qkv.new_empty((*qkv.shape[:-1], size)),
        qkv.new_empty((*qkv.shape[:-1], value)),
    )


def _rotated_whole(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Any, k: Any, positions: Any, sizes: tuple[int, int, int], *_: Any
) -> Tensor:
    return dk.new_empty((*dk.shape[:-1], sum(sizes)))


_ROPES: dict[str, Callable[..., Any]] = {
    "forward": _rotated,
    "backward": _rotated,
    "qkv_forward": _rotated_parts,
    "qkv_backward": _rotated_whole,
}


def _dropout(operation: str) -> Callable[..., Any]:
    return _DROPOUTS[operation]


def _dropout_forward(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)


def _dropout_backward(dy: Tensor, *_: Any) -> Tensor:
    return dy.new_empty(dy.shape)


def _bias_add(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_DROPOUTS: dict[str, Callable[..., Any]] = {
    "forward": _dropout_forward,
    "bias_add": _bias_add,
    "backward": _dropout_backward,
}

_RUNS: dict[str, Callable[..., Any]] = {
    "column_sums": _column_sums,
    "dropout": _dropout,
    "gemm": _gemm,
    "gemm_epilogue": _gemm_epilogue,
    "norm": _norm,
    "activation": _activation,
    "rope": _rope,
}


class PlannedAttention(nn.Module):
    """out [.., h * d_v] of DotProductAttention, keeping for its backward what kernels without a score matrix keep."""

    def __init__(self, attention: DotProductAttention):
        super().__init__()
        self.softmax_offset = attention.softmax_offset

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **_: Any) -> Tensor:
        return _Attention.apply(query_layer, key_layer, value_layer)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and the logarithm of the softmax's denominator, float32 [h] a token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:-2], q.shape[-2] * v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable("planned attention")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors[:3])
