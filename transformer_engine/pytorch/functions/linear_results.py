"""y and dx of a linear layer that are more than a product: summed over ranks, inspected, quantized, or dx * gelu'(u).

A tensor-parallel layer has a weight shard: [N / ranks, K] in the mode "column", [N, K / ranks] in
the mode "row". In the mode "row", each rank computes y over its part of K; in the mode "column", dx
over its part of N. These results are partial sums, which the ranks sum: with sequence parallelism
by a reduce-scatter, after which each rank has M / ranks rows, otherwise by an all-reduce. A sum
begins as soon as its product is complete. Until it is waited for, the result is a `Pending`.

The operands are passed in a list, which is emptied, so that each operand is freed after the product.
"""

from __future__ import annotations

from typing import Any, Literal

from ..primitives.gemm import Epilogue, gemm, gemm_gelu_gradient, multiply
from ..primitives.quantize import Cast, Quantized
from ..tensor.quantizer import Quantizer
from .communication import Pending, begin_sum, gather_and_multiply, multiply_and_scatter
from .linear_operands import to_operand
from .linear_spec import LinearSpec, inspects, sums_over_ranks

# Product results, by the names that inspectors use.
Result = Literal["output", "grad_input"]


def compute_output(operands: list[Any], epilogue: Epilogue, spec: LinearSpec) -> Any:
    """Compute y [M, N] = x [M, K] @ weight [N, K].T + bias [N], complete on this rank, and quantize it if requested.

    Args:
        operands: x, which may be a `Pending` gather, and the weight, both row-wise. The list is emptied.
        epilogue: Product bias, dtype and accumulation.
        spec: Layer settings.
    """
    y = _multiply(operands, epilogue, spec, "output")[0]
    y = _begin_sum(y, spec, "output")
    if isinstance(y, Pending):
        y = y.wait()  # nothing remains to be computed meanwhile
    return y if spec.output_quantizer is None else _quantized(y, spec, spec.output_quantizer)


def begin_input_gradient(
    operands: list[Any], epilogue: Epilogue, spec: LinearSpec
) -> tuple[Any, Any]:
    """Compute dx [M, K] = dy [M, N] @ weight [N, K], and begin its sum over the ranks if it is a partial sum.

    Args:
        operands: Row-wise dy, which may be a `Pending` gather; column-wise weight; then optionally u [M, K]: the
            product multiplies dx by the GELU derivative at u. The list is emptied.
        epilogue: Product dtype and accumulation.
        spec: Layer settings.

    Returns:
        (dx, or its `Pending` sum, which `end_input_gradient` completes; dy, gathered).
    """
    dx, dy = _multiply(operands, epilogue, spec, "grad_input")
    dx = _begin_sum(dx, spec, "grad_input")
    if not isinstance(dx, Pending) and spec.grad_input_quantizer is not None:
        dx = _quantized(dx, spec, spec.grad_input_quantizer)
    return dx, dy


def end_input_gradient(dx: Pending, spec: LinearSpec) -> Any:
    """Wait for dx [M, K] summed over the ranks; quantize it by `spec.grad_input_quantizer`."""
    summed = dx.wait()
    return (
        summed
        if spec.grad_input_quantizer is None
        else _quantized(summed, spec, spec.grad_input_quantizer)
    )


def _multiply(
    operands: list[Any], epilogue: Epilogue, spec: LinearSpec, result: Result
) -> tuple[Any, Any]:
    """Compute epilogue(a @ b.T) from the operands [a, b] or [a, b, u]; the list is emptied.

    Returns:
        (result, its `Pending` sum, or its codes (`Quantized`) if the product quantizes it; a, gathered).
    """
    a, b = operands[:2]
    gelu_input = operands[2:]  # torch 2.11 would trace a starred target as a tuple
    operands.clear()
    cast = _cast_of_product(spec, result)
    if isinstance(a, Pending) and (gelu_input or cast is not None or epilogue.out is not None):
        a = a.wait()  # these products read all rows at once
    if gelu_input:
        return gemm_gelu_gradient(to_operand(a), to_operand(b), gelu_input[0], epilogue), a
    if isinstance(a, Pending):
        return gather_and_multiply(a, b, epilogue)
    # A row-parallel layer adds its bias after the sum. A bias that is passed here is added on each rank, in the
    # epilogue, which the scattered product does not have.
    if epilogue.bias is None and _scatters(spec, result):
        return multiply_and_scatter(a, b, epilogue, spec.parallel), a
    if cast is not None:
        return gemm(to_operand(a), to_operand(b), epilogue, cast), a
    return multiply(to_operand(a), to_operand(b), epilogue), a


def _begin_sum(y: Any, spec: LinearSpec, result: Result) -> Any:
    """Let the inspector read or replace a result, and begin its sum if it is a partial sum over the ranks."""
    if isinstance(y, Pending):
        return y
    if inspects(spec, result):
        y = spec.inspector.inspect(result, y)  # pyright: ignore[reportOptionalMemberAccess]
    return begin_sum(y, spec.parallel) if _is_partial_sum(spec, result) else y


def _is_partial_sum(spec: LinearSpec, result: Result) -> bool:
    return spec.communicates and sums_over_ranks(
        spec.parallel, "row" if result == "output" else "column"
    )


def _scatters(spec: LinearSpec, result: Result) -> bool:
    """Whether reduce-scattering a partial sum overlaps with its product."""
    parallel = spec.parallel
    overlaps = parallel.overlap.scatter and parallel.sequence
    return (
        overlaps and _is_partial_sum(spec, result) and not (spec.traced or inspects(spec, result))
    )


def _cast_of_product(spec: LinearSpec, result: Result) -> Cast | None:
    """Return the cast by which the product epilogue quantizes its result; None if a separate kernel does it.

    Only delayed scaling can be fused: its scale is known before the product runs. A partial sum is not quantized.
    """
    quantizer = spec.output_quantizer if result == "output" else spec.grad_input_quantizer
    if quantizer is None or spec.traced or _is_partial_sum(spec, result) or inspects(spec, result):
        return None
    cast = quantizer.cast(True, False)
    return cast if cast is not None and cast.multiplier is not None else None


def _quantized(y: Any, spec: LinearSpec, quantizer: Quantizer) -> Any:
    """Return y [M, N], or its codes from the product, as a quantized tensor."""
    if isinstance(y, Quantized):
        return quantizer.adopted(y, y.codes.shape, spec.dtype)  # pyright: ignore[reportOptionalMemberAccess]
    return quantizer.quantize(y)
