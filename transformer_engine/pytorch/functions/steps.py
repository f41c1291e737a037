"""One function per operation of a pass: (environment, settings, *inputs) -> results, on torch tensors.

`run.py` looks operations up in `OPERATIONS`; `common/passes/vocabulary.py` says what each one reads and makes. A buffer
holds a tensor, an operand of a product (`Operand`, or `Matrix` for the column direction of values), a quantized tensor,
or the pending result of a collective. Values may have several dimensions in place of the rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
from ..distributed.collectives import allreduce, gather_rows, reduce_scatter_along_first_dim
from ..distributed.faults import check_collective
from ..distributed.operands import PendingOperand, gather_operand
from ..distributed.overlapped_rows import GatheredRows, ScatteredRows
from ..distributed.symmetric_memory import symmetric_all_reduce
from ..primitives.activation import activation_backward, activation_forward
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, gemm, gemm_gelu, gemm_gelu_gradient
from ..primitives.gemm.listed import SymbolicOperand
from ..primitives.gemm.request import MatrixLayout
from ..primitives.operand import Operand, plain
from ..primitives.quantize import dequantize
from ..primitives.transpose import transposed_operand
from ..runtime.symbols import Symbol
from ..runtime.tracing import result_in
from ..tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from ..tensor.quantizer import Matrix, Operands, turned
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from .linear_operands import input_operands, operands_for_products, weight_operands
from .linear_spec import Environment, gathers_codes, gathers_gradient_codes
from .listed_collectives import (
    is_listed,
    list_begin,
    list_check,
    list_gathered_product,
    list_scattered_product,
    list_wait,
)
from .normalization import NormStatistics
from .overlapped_products import gather_over_peers, product_of_rows, scatter_over_peers


def leading_shape(leading: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the dimensions of a result of so many rows, for an input with these dimensions in place of its rows.

    Sequence parallelism scales the rows; it then scales the first dimension.
    """
    before = 1
    for size in leading:
        before = before * size
    if rows == before or not leading:
        return leading
    return (leading[0] * rows // before, *leading[1:])


def _cast(env: Environment, s: CastSettings, x: Any) -> tuple[Any, Any]:
    spec = env.linears[s.layer]
    if s.tensor == "weight":
        return weight_operands(x, spec, s.columnwise)
    if gathers_codes(spec) if s.tensor == "input" else gathers_gradient_codes(spec):
        # Some quantizers take maxima over the ranks.
        check = list_check if is_listed(x) else check_collective
        check(spec.parallel, "quantization of a shard", x)
    matrix: Any = x if isinstance(x, QuantizedTensorStorage) else as_matrix(x)
    if s.tensor == "input" and (s.rowwise or isinstance(x, QuantizedTensorStorage)):
        shards = spec.parallel if gathers_codes(spec) else None
        return input_operands(matrix, spec.input, s.columnwise, shards, spec.parallel.size > 1)
    quantizer = spec.input if s.tensor == "input" else spec.grad_output
    return operands_for_products(quantizer, matrix, s.rowwise, s.columnwise, spec.parallel.size > 1)


def _quantize(env: Environment, s: CastSettings, x: Tensor) -> tuple[Any]:
    spec = env.linears[s.layer]
    quantizer = spec.output if s.tensor == "output" else spec.grad_input
    assert quantizer is not None
    shape = (*leading_shape(env.leading, x.shape[0]), x.shape[-1])
    return (quantizer.quantize(result_in(x, shape)),)


def _dequantize(env: Environment, s: Layer, x: Any) -> tuple[Tensor]:
    if isinstance(x, Matrix):
        return (x.values,)
    if isinstance(x, Operand):
        return (x.codes if x.format is None else dequantize(x._replace(dtype=env.linears[s.layer].dtype)),)
    return (plain_matrix(x),)


def _dense(env: Environment, s: None, x: Any) -> tuple[Tensor]:
    """Values, in their shape, that form a matrix with a contiguous axis.

    The gradient of a sum has no contiguous axis, and each reader would copy it.
    """
    if isinstance(x, QuantizedTensorStorage):
        x = x.dequantize()
    if x.is_contiguous():
        return (x,)
    matrix = as_matrix(x)
    if not MatrixLayout.of(matrix.shape, matrix.stride()).stride:
        matrix = matrix.contiguous()
    if not matrix.is_contiguous():
        return (x,)  # readers see the matrix as a view of x
    return (result_in(matrix, x.shape),)


def _convert(env: Environment, s: Layer, x: Any) -> tuple[Tensor]:
    dtype = env.linears[s.layer].dtype
    return (x.dequantize(dtype=dtype) if isinstance(x, QuantizedTensorStorage) else x.to(dtype),)


def operand_of(value: Any, transposed: bool) -> Operand:
    """Return a buffer as a product reads it, transposed for unquantized values that are read by columns."""
    if isinstance(value, Tensor):
        matrix = as_matrix(value)
        return plain(matrix.t() if transposed else matrix)
    if type(value) is Symbol:
        matrix = as_matrix(value)  # pyright: ignore[reportArgumentType]
        return SymbolicOperand(*plain(matrix.t() if transposed else matrix))
    operand = turned(value)
    return SymbolicOperand(*operand) if type(operand.codes) is Symbol else operand


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
    left, right = operand_of(a, s.turned[0]), operand_of(b, s.turned[1])
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
    left, right = operand_of(dy, s.turned[0]), operand_of(x, s.turned[1])
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


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather": gather_rows,
    "all_reduce": allreduce,
    "reduce_scatter": reduce_scatter_along_first_dim,
}


def _beginning(collective: str) -> Callable[..., tuple[Any]]:
    def begin(env: Environment, s: Collective, x: Any) -> tuple[Any]:
        if is_listed(x):
            return (list_begin(begin, collective, env, s, x),)
        parallel = env.linears[s.group].parallel
        check_collective(parallel, collective, x)
        if collective == "all_gather" and s.overlaps:
            rows = gather_over_peers(x, parallel)
            if rows is not None:
                return (rows,)
        if isinstance(x, Operand):
            return (gather_operand(x, parallel.checked_group(), s.axis),)
        if collective == "all_reduce" and parallel.sums_symmetrically:
            kind = parallel.symmetric
            return (symmetric_all_reduce(x, parallel.checked_group(), all_reduce_type=kind),)
        traced, quantized = torch.compiler.is_compiling(), isinstance(x, QuantizedTensorStorage)
        if traced and quantized:
            x = storage_of(x)  # a compiler cannot trace the construction of a quantized tensor
        later = not (quantized or traced)
        return (COLLECTIVES[collective](x, parallel.checked_group(), later),)

    return begin


def _wait(env: Environment, s: Collective, pending: Any) -> tuple[Any]:
    if is_listed(pending):
        return (list_wait(_wait, env, s, pending),)
    if isinstance(pending, (PendingOperand, GatheredRows, ScatteredRows)):
        result = pending.wait()
    else:
        result, work = pending
        if work is not None:
            work.wait()
    return _dense(env, None, result) if s.dense else (result,)


def _gathered_product(
    env: Environment, s: OverlappedProduct, pending: Any, b: Any, bias: Tensor | None = None
) -> tuple[Any, Any]:
    if is_listed(pending):
        columns = operand_of(b, s.product.turned[1]).rows
        return list_gathered_product(_gathered_product, env, s, pending, b, bias, columns)
    if isinstance(pending, GatheredRows):
        spec, product = env.linears[s.product.layer], s.product
        right = operand_of(b, product.turned[1])
        epilogue = Epilogue(spec.dtype, bias=bias, exact=getattr(spec.accumulation, product.kind))
        y = product_of_rows(pending, right, epilogue)
        return y, _wait(env, s.collective, pending)[0]
    (whole,) = _wait(env, s.collective, pending)
    return _product(env, s.product, whole, b, bias)[0], whole


def _scattered_product(env: Environment, s: OverlappedProduct, a: Any, b: Any) -> tuple[Any]:
    parallel, product = env.linears[s.collective.group].parallel, s.product
    spec = env.linears[product.layer]
    left, right = operand_of(a, product.turned[0]), operand_of(b, product.turned[1])
    if is_listed(a):
        shape = (left.rows, right.rows)
        return (list_scattered_product(_scattered_product, env, s, a, b, shape),)
    epilogue = Epilogue(spec.dtype, exact=getattr(spec.accumulation, product.kind))
    rows = scatter_over_peers(left, right, epilogue, parallel)
    if rows is not None:
        return (rows,)
    return _beginning("reduce_scatter")(env, s.collective, *_product(env, product, a, b))


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
