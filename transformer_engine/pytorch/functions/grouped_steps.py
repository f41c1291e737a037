"""Steps over groups of rows that chains of operations contribute, on the operations of `grouped_products.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common.passes.vocabulary import CastSettings, ColumnSum, Inspection, Layer, Product
from .grouped_call import GroupedCall
from .grouped_products import (
    bias_gradients,
    cast_groups,
    converted_weights,
    dequantized_groups,
    inspected_groups,
    product_of_groups,
    weight_gradients,
)
from .linear_spec import Environment
from .steps import OPERATIONS


def _call(env: Environment, s: Any) -> GroupedCall:
    return env.linears[s.layer]  # pyright: ignore[reportReturnType]


def _cast(env: Environment, s: CastSettings, x: Any) -> tuple[Any, Any]:
    return cast_groups(x, _call(env, s), s.tensor, s.rowwise, s.columnwise)


def _convert(env: Environment, s: Layer, x: Any) -> tuple[Any]:
    return (converted_weights(x, _call(env, s)),)


def _dequantize(env: Environment, s: Layer, x: Any) -> tuple[Any]:
    return (dequantized_groups(x, _call(env, s)),)


def _product(env: Environment, s: Product, a: Any, b: Any, bias: Any = None) -> tuple[Tensor]:
    return (product_of_groups(a, b, _call(env, s), s.kind, s.turned[1], bias),)


def _inspect(env: Environment, s: Inspection, y: Tensor) -> tuple[Tensor]:
    return (inspected_groups(y, _call(env, s), s.tensor),)


def _weight_gradient(env: Environment, s: Product, dy: Any, x: Any) -> tuple[Any]:
    return (weight_gradients(dy, x, _call(env, s), env.dtypes[s.layer][0], s.turned),)


def _column_sum(env: Environment, s: ColumnSum, x: Tensor) -> tuple[Any]:
    return (bias_gradients(x, _call(env, s), env.dtypes[s.layer][1]),)


OPERATIONS.update(
    grouped_cast=_cast,
    grouped_convert=_convert,
    grouped_inspect=_inspect,
    grouped_dequantize=_dequantize,
    grouped_product=_product,
    grouped_weight_gradient=_weight_gradient,
    grouped_column_sum=_column_sum,
)
