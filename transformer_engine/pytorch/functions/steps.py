"""One function per operation of a pass: (environment, settings, *inputs) -> results, on torch tensors.

`run.py` looks operations up in `OPERATIONS`; `common/passes/vocabulary.py` says what each one reads and makes. A buffer
holds a tensor, an operand of a product (`Operand`, or `Matrix` for the column direction of values), a quantized tensor,
or the pending result of a collective. Values may have several dimensions in place of the rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...common.passes.vocabulary import (
    Activation,
    CastSettings,
    Collective,
    ColumnSum,
    Inspection,
    Layer,
    NormSettings,
    OverlappedProduct,
    Product,
)
from ..primitives.activation import activation_backward, activation_forward
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, gemm, gemm_gelu, gemm_gelu_gradient
from ..primitives.operand import Operand
from ..primitives.transpose import transposed_operand
from ..runtime.tracing import result_in
from ..tensor.quantizer import Operands
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from .communication import COLLECTIVES, Pending, begin, gathered_product, scattered_product
from .linear_operands import (
    cast_gradient,
    cast_input,
    converted,
    dense_values,
    dequantized,
    operand_of,
    read_as,
    weight_operands,
)
from .linear_spec import Environment
from .normalization import NormStatistics
from .sequence import leading_shape


def _cast(env: Environment, s: CastSettings, x: Any) -> tuple[Any, Any]:
    spec = env.linears[s.layer]
    if s.tensor == "weight":
        return weight_operands(x, spec, s.columnwise)
    cast = cast_input if s.tensor == "input" else cast_gradient
    return cast(x, spec, s.rowwise, s.columnwise)


def _quantize(env: Environment, s: CastSettings, x: Tensor) -> tuple[Any]:
    spec = env.linears[s.layer]
    quantizer = spec.output if s.tensor == "output" else spec.grad_input
    assert quantizer is not None
    shape = (*leading_shape(env.leading, x.shape[0]), x.shape[-1])
    return (quantizer.quantize(result_in(x, shape)),)


def _dequantize(env: Environment, s: Layer, x: Any) -> tuple[Tensor]:
    return (dequantized(x, env.linears[s.layer].dtype),)


def _dense(env: Environment, s: None, x: Any) -> tuple[Tensor]:
    return (dense_values(x),)


def _convert(env: Environment, s: Layer, x: Any) -> tuple[Tensor]:
    return (converted(x, env.linears[s.layer].dtype),)


def _product(
    env: Environment,
    s: Product,
    a: Any,
    b: Any,
    bias: Tensor | None = None,
    activated: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    spec = env.linears[s.layer]
    left, right = operand_of(read_as(a, s.turned[0])), operand_of(read_as(b, s.turned[1]))
    exact = getattr(spec.accumulation, s.kind)
    if out is not None:
        return (gemm(left, right, Epilogue(out.dtype, bias, out, True, exact)),)
    epilogue = Epilogue(spec.dtype, bias=bias, exact=exact)
    if s.activation == "gelu":
        y, x = gemm_gelu(left, right, epilogue, s.keeps or spec.may_run_again)
        return y, x if s.keeps else None
    if s.activation is not None:
        assert activated is not None
        return (gemm_gelu_gradient(left, right, activated, epilogue),)
    if s.cast is None:
        return (gemm(left, right, epilogue),)
    quantizer = spec.output if s.cast.tensor == "output" else spec.grad_input
    assert quantizer is not None
    made: Any = gemm(left, right, epilogue, quantizer.cast(True, False))  # pyright: ignore
    codes: Any = made.codes
    shape = (*leading_shape(env.leading, codes.shape[0]), codes.shape[-1])
    return (quantizer.adopted(made, shape, spec.dtype),)


def _weight_gradient(env: Environment, s: Product, dy: Any, x: Any) -> tuple[Tensor | None]:
    spec, dtype = env.linears[s.layer], env.dtypes[s.layer][0]
    left, right = operand_of(read_as(dy, s.turned[0])), operand_of(read_as(x, s.turned[1]))
    exact = spec.accumulation.grad_weight
    return (spec.weight_gradient.compute(left, right, exact, dtype, spec.inspector),)


def _codes(env: Environment, s: CastSettings) -> tuple[Any, Any]:
    """Return the quantizer of a fused cast, and how the kernel that makes its source is to quantize it."""
    quantizer = getattr(env.linears[s.layer], s.tensor)
    return quantizer, quantizer.cast(s.rowwise, s.columnwise)


def _column_sum(env: Environment, s: ColumnSum, x: Tensor) -> tuple[Any, ...]:
    dtype, matrix = env.dtypes[s.layer][1], as_matrix(x)
    if s.cast is None:
        return (column_sums(matrix, dtype),)
    quantizer, cast = _codes(env, s.cast)
    quantized, sums = column_sums(matrix, dtype, cast)
    return (*quantizer.adopt(quantized, x.dtype), sums)


def _norm(
    env: Environment, s: NormSettings, x: Tensor, gamma: Tensor, beta: Tensor | None = None
) -> tuple[Any, ...]:
    norm, matrix = env.norms[s.norm], plain_matrix(x)
    if s.cast is None:
        y, statistics = norm.forward(matrix, gamma, beta)
        return (y, *statistics)
    quantizer, cast = _codes(env, s.cast)
    quantized, statistics = norm.forward(matrix, gamma, beta, cast)
    return (*quantizer.adopt(quantized, x.dtype), *statistics)


def _norm_backward(
    env: Environment,
    s: NormSettings,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstdev: Tensor,
    gamma: Tensor,
    addend: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    statistics = NormStatistics(mean, rstdev)
    matrices = plain_matrix(dy), plain_matrix(x)
    add = None if addend is None else as_matrix(addend)
    return env.norms[s.norm].backward(*matrices, statistics, gamma, add)


def _activation(env: Environment, s: Activation, x: Tensor) -> tuple[Any, ...]:
    name, parameters = env.activations[s.activation]
    if s.cast is None:
        return (activation_forward(name, x, parameters),)
    quantizer, cast = _codes(env, s.cast)
    quantized = activation_forward(name, as_matrix(x), parameters, cast)
    operands: Operands = quantizer.adopt(quantized, x.dtype)
    return operands


def _activation_backward(env: Environment, s: Activation, dy: Tensor, x: Tensor) -> tuple[Any, ...]:
    name, parameters = env.activations[s.activation]
    if s.cast is None:
        return (activation_backward(name, dy, x, parameters),)
    quantizer, cast = _codes(env, s.cast)
    dtype = None if s.sums is None else env.dtypes[s.sums][1]
    quantized, sums = activation_backward(name, dy, x, parameters, cast, dtype)
    return (*quantizer.adopt(quantized, x.dtype), sums)


def _add(env: Environment, s: None, a: Tensor, b: Tensor) -> tuple[Tensor]:
    return (a + b.reshape(a.shape),)


def _add_bias(env: Environment, s: None, y: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (y + bias,)


def _inspect(env: Environment, s: Inspection, y: Tensor) -> tuple[Tensor]:
    inspector = env.linears[s.layer].inspector
    return (y if inspector is None else inspector.inspect(s.tensor, y),)


def _accumulate(env: Environment, s: None, total: Tensor, x: Tensor) -> tuple[Tensor]:
    return (total.add_(x),)


def _scale(env: Environment, s: None, x: Tensor, factor: Any) -> tuple[Tensor]:
    return (x * factor,)


def _beginning(collective: str) -> Callable[..., tuple[Any]]:
    def begin_step(env: Environment, s: Collective, x: Any) -> tuple[Any]:
        return (begin(collective, x, env.linears[s.group].parallel, s.axis, s.overlaps, s.dense),)

    return begin_step


def _wait(env: Environment, s: Collective, pending: Pending) -> tuple[Any]:
    return (pending.wait(),)


def _epilogue(env: Environment, product: Product, bias: Tensor | None = None) -> Epilogue:
    spec = env.linears[product.layer]
    return Epilogue(spec.dtype, bias=bias, exact=getattr(spec.accumulation, product.kind))


def _gathered_product(
    env: Environment, s: OverlappedProduct, pending: Pending, b: Any, bias: Tensor | None = None
) -> tuple[Any, Any]:
    right = read_as(b, s.product.turned[1])
    return gathered_product(pending, right, _epilogue(env, s.product, bias))


def _scattered_product(env: Environment, s: OverlappedProduct, a: Any, b: Any) -> tuple[Any]:
    parallel, turned = env.linears[s.collective.group].parallel, s.product.turned
    epilogue = _epilogue(env, s.product)
    return (scattered_product(read_as(a, turned[0]), read_as(b, turned[1]), epilogue, parallel),)


def _transpose(env: Environment, s: None, x: Operand) -> tuple[Operand]:
    return (transposed_operand(x),)


OPERATIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cast": _cast,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "dense": _dense,
    "convert": _convert,
    "product": _product,
    "weight_gradient": _weight_gradient,
    "add_bias": _add_bias,
    "inspect": _inspect,
    "add": _add,
    "accumulate": _accumulate,
    "scale": _scale,
    "norm": _norm,
    "norm_backward": _norm_backward,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "column_sum": _column_sum,
    "transpose": _transpose,
    **{f"{name}.begin": _beginning(name) for name in COLLECTIVES},
    **{f"{name}.wait": _wait for name in COLLECTIVES},
    "gathered_product": _gathered_product,
    "scattered_product": _scattered_product,
}
