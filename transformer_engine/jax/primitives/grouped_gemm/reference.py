"""Grouped-product request, and its float32 reference with XLA's ragged products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ....common.dispatch import Backend
from ...runtime.manual_axes import align_manual_axes
from ..kernels import batch_in_turn, result_like, run_compiled

# Both operands' code scales, one per group; None for values.
Scales = tuple[Array, Array] | None


class GroupedGemmRequest(NamedTuple):
    """Grouped-product properties that determine its backend.

    Attributes:
        groups: Number of groups G.
        m: Number of rows.
        n: Result columns.
        k: Columns of a.
        dtype: Operand dtype.
        result: Result dtype.
        contracts_rows: Whether the rows are contracted; see `grouped_contraction`.
        features_first: Whether b is [G, N, K] instead of [G, K, N].
        scaled: Whether the operands are FP8 codes with one scale per group.
        platform: Platform of the program, "cpu" or "cuda".
    """

    groups: int
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    result: jnp.dtype
    contracts_rows: bool
    features_first: bool
    scaled: bool
    platform: str


_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
_IN_FLOAT32: Any = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
_Transpose = Callable[[Array, Array, Array], Array]


def multiply_rows(
    a: Array,
    b: Array,
    group_sizes: Array,
    scales: Scales,
    dtype: jnp.dtype,
    features_first: bool,
    exact: bool,
) -> Array:
    """Multiply grouped rows by the matrix of their group, with float32 sums; see `grouped_gemm`."""
    if features_first:
        b = jnp.swapaxes(b, 1, 2)
    if scales is not None:
        # Both scales for a group are applied to its matrix.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32) * (scales[0] * scales[1])[:, None, None]
    return _product(_rows, a, b, group_sizes).astype(dtype)


def contract_rows(
    a: Array, b: Array, group_sizes: Array, scales: Scales, dtype: jnp.dtype
) -> Array:
    """Contract two operands over the rows of each group; see `grouped_contraction`."""
    if scales is not None:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = _product(_contraction, a, b, group_sizes)
    if scales is not None:
        product = product * (scales[0] * scales[1])[:, None, None]
    return product.astype(dtype)


# JAX has no vmap rule for a ragged product unless all operands are mapped alike, and no derivative for one that
# contracts rows. Both products are linear in either operand, and each is the transpose of the other.
_rows = Primitive("transformer_engine_grouped_rows")  # [M, K], [G, K, N], sizes [G] -> [M, N]
# [M, K], [M, N], sizes [G] -> [G, K, N]
_contraction = Primitive("transformer_engine_grouped_contraction")


def _product(primitive: Primitive, a: Array, b: Array, group_sizes: Array) -> Array:
    """Compute the product in float32; the operands have two dtypes if one is a cotangent."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return primitive.bind(*align_manual_axes(a.astype(dtype), b.astype(dtype), group_sizes))


def _define(
    primitive: Primitive,
    run: Callable[[Array, Array, Array], Array],
    shape_of: Callable[[Any, Any, Any], tuple[int, ...]],
    transpose_of_a: _Transpose,
    transpose_of_b: _Transpose,
) -> None:
    """Register the rules of JAX for a product that is linear in a and in b.

    Args:
        primitive: The product (a, b, group_sizes).
        run: Computes the product.
        shape_of: Returns the shape of the product.
        transpose_of_a: (b, dout, group_sizes) -> cotangent of a.
        transpose_of_b: (a, dout, group_sizes) -> cotangent of b.
    """
    compiled = jax.jit(primitive.bind)
    primitive.def_impl(functools.partial(run_compiled, compiled))

    @primitive.def_abstract_eval
    def _shape(a: Any, b: Any, group_sizes: Any) -> ShapedArray:
        return result_like(
            a, jax.ShapeDtypeStruct(shape_of(a, b, group_sizes), jnp.dtype(jnp.float32))
        )

    def differentiate_rows(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (a, b, group_sizes), (da, db, _) = primals, tangents
        out = primitive.bind(a, b, group_sizes)
        parts = []
        if type(da) is not ad.Zero:
            parts.append(_product(primitive, da, b, group_sizes))
        if type(db) is not ad.Zero:
            parts.append(_product(primitive, a, db, group_sizes))
        return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

    def transposed(dout: Any, a: Any, b: Any, group_sizes: Array) -> tuple[Any, Any, None]:
        if type(dout) is ad.Zero:
            return None, None, None
        if ad.is_undefined_primal(a):
            return transpose_of_a(b, dout, group_sizes).astype(a.aval.dtype), None, None
        return None, transpose_of_b(a, dout, group_sizes).astype(b.aval.dtype), None

    ad.primitive_jvps[primitive] = differentiate_rows
    ad.primitive_transposes[primitive] = transposed
    batching.primitive_batchers[primitive] = functools.partial(batch_in_turn, primitive.bind)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))


_define(
    _rows,
    lambda a, b, group_sizes: lax.ragged_dot(a, b, group_sizes, **_IN_FLOAT32),
    lambda a, b, group_sizes: (a.shape[0], b.shape[2]),
    lambda b, dout, group_sizes: _product(_rows, dout, jnp.swapaxes(b, 1, 2), group_sizes),
    lambda a, dout, group_sizes: _product(_contraction, a, dout, group_sizes),
)
_define(
    _contraction,
    lambda a, b, group_sizes: lax.ragged_dot_general(
        a, b, group_sizes, _CONTRACT_ROWS, **_IN_FLOAT32
    ),
    lambda a, b, group_sizes: (group_sizes.shape[0], a.shape[1], b.shape[1]),
    lambda b, dout, group_sizes: _product(_rows, b, jnp.swapaxes(dout, 1, 2), group_sizes),
    lambda a, dout, group_sizes: _product(_rows, a, dout, group_sizes),
)


BACKEND = Backend[GroupedGemmRequest](
    "ragged_dot", bind=lambda request: contract_rows if request.contracts_rows else multiply_rows
)
