"""Backends that allocate the same memory as a GPU's backends and compute nothing, for runs on fake tensors.

Inside `planning` every operation uses them, on every device. An operation without such a backend runs its reference,
whose intermediate tensors are larger than a kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...common.dispatch import PlanFailure, Table, binding
from ...common.kernels import launch
from ..attention import DotProductAttention
from ..functions import weight_gradient
from ..primitives.activation import ActivationRequest, MeasuredGradient, gradient_fuses
from ..primitives.cross_entropy import CrossEntropyRequest
from ..primitives.gemm import composed, cublaslt_library
from ..primitives.gemm.composed import CODES, GELU, GELU_GRADIENT, FusedRequest
from ..primitives.norm import NormRequest
from ..primitives.norm import triton as norm
from ..primitives.quantize import CastRequest, Quantized, QuantizeSpec
from ..primitives.quantize.fused_codes import has_blocks_in_rows
from ..quantization import delayed_scaling
from ..quantization.autocast import reinstate, snapshot
from ..runtime.autograd import Function
from ..runtime.device import current_hardware
from ..runtime.double_backward import once_differentiable
from ..tensor.elements import empty_quantized


@contextmanager
def planning(quantized: Callable[[Tensor, Quantized], None]) -> Iterator[None]:
    """Run operations without computing; `quantized(x, result)` is called for every quantization.

    Global state that modules share is replaced during the block and restored after it.
    """

    def plan_quantize(spec: QuantizeSpec, x: Tensor, *rest: Any) -> Quantized:
        result = _codes(x.shape[0], x.shape[1], spec, x.device)
        quantized(x, result)
        return result

    def bind(table: Table[Any], request: Any) -> Callable[..., Any]:
        if table.operation == "quantize":
            return partial(plan_quantize, request.spec)
        return _PLANNERS.get(table.operation, _results)(table, request)

    pools, moment = delayed_scaling.registry.pools, snapshot()
    dummies = dict(weight_gradient._dummy_wgrads)
    delayed_scaling.registry.pools = {}
    weight_gradient._dummy_wgrads.clear()
    try:
        with binding(bind):
            yield
    finally:
        delayed_scaling.registry.pools = pools
        weight_gradient._dummy_wgrads.clear()
        weight_gradient._dummy_wgrads.update(dummies)
        reinstate(moment)


def _results(table: Table[Any], request: Any) -> Callable[..., Any]:
    """Allocate the results of an operation as its compiler operator describes them; otherwise run its reference."""
    if table.operator is None:
        call = table.backends[-1].bind(request)  # pyright: ignore[reportOptionalCall]
        assert not isinstance(call, PlanFailure)
        return call
    return table.operator(request).results


def _codes(rows: int, depth: int, spec: QuantizeSpec, device: torch.device) -> Quantized:
    result = empty_quantized(spec, rows, depth, device)
    if spec.format.block is None:
        return result._replace(amax=torch.empty(1, dtype=torch.float32, device=device))
    both_alike = spec.transposes or not spec.hadamard
    return (
        result._replace(amax_t=result.amax)
        if spec.rowwise and spec.columnwise and both_alike
        else result
    )


def _gemm_epilogue(table: Table[FusedRequest], request: FusedRequest) -> Callable[..., Any]:
    """Plan one cuBLASLt call if it would be used, else the product and the operations after it."""
    product = request.product
    available = (
        product.device == "cuda"
        and product.hardware.has("cublaslt")
        and cublaslt_library.unavailable_reason() is None
    )
    widths = {GELU: (1, 2), GELU_GRADIENT: (2,), CODES: (1,)}[
        request.kind
    ]  # bytes per operand element
    if available and product.a_element.itemsize in widths and product.dtype.itemsize == 2:
        return _results(table, request)
    return composed.bind(request)


def _norm(table: Table[NormRequest], request: NormRequest) -> Callable[..., Any]:
    cast, results = request.cast, _results(table, request)
    if cast is not None:
        fuses = has_blocks_in_rows(cast.spec)
        statistics = 2 if request.centered else 1

        def codes(x: Tensor, *_: Any) -> tuple[Any, ...]:
            result = _cast(x, x.shape[1], cast, fuses)
            return result, *(
                x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(statistics)
            )

        return codes
    if not request.operation.endswith("backward"):
        return results

    def gradients(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        # Allocate the workspace in which a GPU's kernels sum columns, as in their program.
        if (
            request.device.type != "cuda"
            or launch.unavailable_reason(current_hardware()) is not None
            or not request.shape[0]
        ):
            partial_sums = None
        else:
            sums = {
                name: output
                for step in norm.backward_program(request).steps
                for name, output in zip(step.outputs, step.launch.outputs, strict=True)
            }
            workspace = sums["workspace"]
            assert workspace is not None and workspace.shape is not None
            partial_sums = dy.new_empty(workspace.shape, dtype=torch.float32)
        result = results(dy, *rest)
        del partial_sums  # allocated until the results are
        return result

    return gradients


def _cast(x: Tensor, width: int, cast: CastRequest, fuses: bool = True) -> Quantized:
    """Allocate codes for a result [M, width], which is stored first if a separate cast follows."""
    stored = not fuses if cast.spec.format.block is not None else not cast.given
    result = x.new_empty(x.shape[0], width) if stored else None
    codes = _codes(x.shape[0], width, cast.spec, x.device)
    del result  # allocated until the codes are, as the cast reads it
    return codes


def _activation(table: Table[ActivationRequest], request: ActivationRequest) -> Callable[..., Any]:
    cast, output = request.cast, request.output
    if output is not None:

        def gradient_and_output(dy: Tensor, x: Any, *_: Any) -> tuple[Any, Quantized]:
            shape = (x.codes if request.encoded else x).shape
            if cast is None:
                amax = torch.empty(1, dtype=torch.float32, device=dy.device)
                gradient: Any = MeasuredGradient(dy.new_empty(shape), amax)
            else:
                gradient = _cast(dy, shape[1], cast)
            return gradient, _codes(dy.shape[0], dy.shape[1], output, dy.device)

        return gradient_and_output
    if cast is None:
        return _results(table, request)
    width = request.made[1]
    if not request.backward:
        return lambda x, *_: _cast(x, width, cast)
    aligned = not request.gated or width % 256 == 0
    fuses = aligned and gradient_fuses(cast.spec, request.dbias is not None)

    def gradient(dy: Tensor, x: Tensor, *_: Any) -> tuple[Quantized, Tensor | None]:
        sums = None if request.dbias is None else x.new_empty(width, dtype=request.dbias)
        return _cast(x, width, cast, fuses), sums

    return gradient


def _cross_entropy(
    table: Table[CrossEntropyRequest], request: CrossEntropyRequest
) -> Callable[..., Any]:
    """Plan the results; a gradient in place of the logits allocates nothing."""
    return (lambda x, *_: x) if request.in_place else _results(table, request)


_PLANNERS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "norm": _norm,
    "activation": _activation,
    "cross_entropy": _cross_entropy,
    "gemm_epilogue": _gemm_epilogue,
}


class PlannedAttention(nn.Module):
    """DotProductAttention that allocates out [.., h * d_v] and the saved tensors for kernels without a score matrix."""

    def __init__(self, attention: DotProductAttention):
        super().__init__()
        self.softmax_offset = attention.softmax_offset

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **_: Any
    ) -> Tensor:
        return _PlannedAttentionFunction.apply(query_layer, key_layer, value_layer)


class _PlannedAttentionFunction(Function):
    """Saves q, k, v, out and the log of the softmax denominator, float32 [h] per token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:-2], q.shape[-2] * v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable("planned attention")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors[:3])
