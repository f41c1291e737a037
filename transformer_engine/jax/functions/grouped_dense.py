"""y [M, N] = (rows of group g in x [M, K]) @ kernel[g] (+ bias[g]), in the quantizers' precision."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...common import env
from ...common.checks import described
from ...common.numbers import with_article
from ..primitives.grouped_gemm import (
    Scales,
    grouped_block_contraction,
    grouped_block_gemm,
    grouped_contraction,
    grouped_gemm,
)
from ..quantize.grouped import (
    GroupedNoScaleTensor,
    GroupedQuantizer,
    GroupedScaledTensor1x,
    group_of_rows,
    groups_advanced_together,
)
from ..quantize.quantizers import QuantizerSet, as_cotangent, noop_quantizer_set
from ..quantize.scaling_modes import TensorUsage
from ..quantize.sharing import align_mesh_axes
from ..runtime.checks import (
    check_axis_pairs,
    check_floating,
    check_instance,
    check_shaped,
    check_sizes,
    check_values,
)
from ..runtime.code_bits import bits_to_codes, codes_to_bits
from ..runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from ..runtime.undifferentiated import constant, like, undifferentiated

__all__ = ["grouped_dense"]

ROWS, COLUMNS = TensorUsage.LHS, TensorUsage.LHS_TRANS


class RowsSpec(NamedTuple):
    """Properties of grouped rows.

    Attributes:
        mesh_axes: Manual mesh axes whose devices hold other rows from the same groups, which count in maxima.
        aligned: Whether every group size is a multiple of every format's block.
    """

    mesh_axes: tuple[str, ...] = ()
    aligned: bool = False


ANY_ROWS = RowsSpec()


def grouped_dense(
    x: Array,
    kernel: Array,
    group_sizes: Array,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Array | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    kernel_fsdp_info: tuple[str | None, int] = (None, -1),
) -> Array:
    """Multiply row groups by one kernel per group: y [M, N]. The first group_sizes[0] rows are group 0, and so on.

    Args:
        x: Input [M, K].
        kernel: Kernels [G, K, N], or [G, N, K].
        group_sizes: Rows per group, int32 [G], with a sum of at most M. Rows beyond the sum become zero, and do not
            change scales.
        contracting_dims: ((1,), (1,)), or ((1,), (2,)) for kernels [G, N, K].
        bias: Biases [G, N], or None.
        precision: Accepted for compatibility; partial sums are in float32.
        preferred_element_type: Dtype of y, by default x's dtype.
        group_offset: Accepted for compatibility.
        quantizer_set: GroupedQuantizer set, which quantizes each group as a separate matrix. Its cotangent is the state
            of the next step.
        kernel_fsdp_info: (mesh axis, dimension) over which the kernel is sharded; XLA gathers it.
    """
    kernel = check_kernel(x, kernel, group_sizes, contracting_dims)
    groups, _, features = kernel.shape
    if group_offset is not None:
        raise NotImplementedError(
            f"group_offset={described(group_offset)}: kernels of some groups are unsupported; give None and the "
            "kernels of all groups"
        )
    if bias is not None:
        check_shaped("bias", bias, (groups, features))
    if preferred_element_type is not None:
        preferred_element_type = check_floating("preferred_element_type", preferred_element_type)
    y = grouped_matmul(x, kernel, group_sizes, quantizer_set)
    if bias is not None:
        y = add_bias(y, bias, group_of_rows(group_sizes, x.shape[0]))
    return y if preferred_element_type is None else y.astype(preferred_element_type)


def grouped_matmul(
    x: Array,
    kernel: Array,
    group_sizes: Array,
    quantizer_set: QuantizerSet,
    spec: RowsSpec = ANY_ROWS,
) -> Array:
    """Compute y [M, N] as `grouped_dense` for x [M, K] and the kernel from `check_kernel`.

    Args:
        x: Input [M, K].
        kernel: Kernels [G, K, N].
        group_sizes: Rows per group.
        quantizer_set: GroupedQuantizer set.
        spec: Row properties.
    """
    check_instance("quantizer_set", quantizer_set, QuantizerSet)
    for name in ("x", "kernel", "dgrad"):
        quantizer = getattr(quantizer_set, name)
        if quantizer is not None and not isinstance(quantizer, GroupedQuantizer):
            raise TypeError(
                f"quantizer_set.{name} is {with_article(type(quantizer))}; make the set with n_groups={kernel.shape[0]}"
            )
    if quantizer_set.is_noop:
        kernel = kernel.astype(x.dtype)
    values = x, kernel, group_sizes.astype(jnp.int32)
    values, quantizer_set = align_mesh_axes(values, quantizer_set)
    return with_automatic_axes(
        lambda *arrays: _grouped_dense(*arrays, spec),
        *values,
        quantizer_set,
        out=lambda: unique_axes((explicit_entries(values[0])[0], explicit_entries(values[1])[2])),
    )


def add_bias(y: Array, bias: Array, groups: Array) -> Array:
    """Compute y [M, N] + bias [G, N] for every row's group, groups int32 [M]; rows with group G have no bias."""
    (y, bias, groups), _ = align_mesh_axes((y, bias.astype(y.dtype), groups))
    return _add_bias(y, bias, groups)


@jax.custom_vjp
def _add_bias(y: Array, bias: Array, groups: Array) -> Array:
    return y + jnp.concatenate((bias, jnp.zeros((1, bias.shape[1]), y.dtype)))[groups]


def _bias_gradient(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Any]:
    """Compute dbias [G, N] as a product with ones and zeros.

    The gradient of a look-up would be summed in dy's dtype: a bfloat16 sum of 4096 numbers stops growing at a tenth.
    """
    empty, groups = residuals
    belongs = jnp.arange(empty.shape[1])[:, None] == groups
    dbias = jnp.matmul(
        belongs.astype(dy.dtype),
        dy,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return dy, dbias.astype(empty.dtype), as_cotangent(groups)


_add_bias.defvjp(
    lambda y, bias, groups: (_add_bias(y, bias, groups), (like(bias), groups)), _bias_gradient
)


def check_kernel(x: Array, kernel: Array, group_sizes: Array, dims: Any = ((1,), (1,))) -> Array:
    """Arrange kernel as [G, K, N]; raise an error if the arguments do not fit together."""
    check_values("x", x)
    check_values("kernel", kernel)
    if x.ndim != 2 or kernel.ndim != 3:
        raise ValueError(f"x {x.shape} and kernel {kernel.shape}; give [M, K] and [G, K, N]")
    check_axis_pairs("contracting_dims", dims)
    # An axis that the array does not have stays as given, and fails the check.
    axes = tuple(
        tuple(d + a.ndim if d < 0 else d for d in side)
        for side, a in zip(dims, (x, kernel), strict=True)
    )
    if axes not in (((1,), (1,)), ((1,), (2,))):
        raise ValueError(
            f"contracting_dims={dims}; give ((1,), (1,)), or ((1,), (2,)) for [G, N, K]"
        )
    if axes[1] == (2,):
        kernel = jnp.swapaxes(kernel, 1, 2)
    if x.shape[1] != kernel.shape[1]:
        raise ValueError(
            f"x {x.shape} contracts {x.shape[1]} elements, kernel {kernel.shape[1]}; both must be equal"
        )
    check_sizes("group_sizes", group_sizes, kernel.shape[0], x.shape[0])
    return kernel


def _encode(
    quantizer: GroupedQuantizer | None,
    x: Array,
    group_sizes: Array | None,
    spec: RowsSpec = ANY_ROWS,
) -> tuple[Any, Any]:
    if quantizer is None:
        return GroupedNoScaleTensor(x, group_sizes=group_sizes), None
    return quantizer.encode(x, group_sizes, mesh_axes=spec.mesh_axes, aligned=spec.aligned)


def _scales(a: Any, b: Any) -> Scales:
    """Scales of two quantized tensors if both have one per group, so that a product can read their codes."""
    return None if a.scales is None or b.scales is None else (a.scales, b.scales)


def _have_block_scales(a: Any, b: Any) -> bool:
    """Whether both tensors are quantized with block scales."""
    both = isinstance(a, GroupedScaledTensor1x) and isinstance(b, GroupedScaledTensor1x)
    return both and a.scales is None and b.scales is None


def _multiply_rows(x: Any, kernel: Any, group_sizes: Array, dtype: Any, backward: bool) -> Array:
    """Compute (rows of group g in x [M, K]) @ kernel[g] [K, N]; backward: x is dy [M, N], contracted over N.

    Partial sums over codes are promoted to float32 as in products of one matrix, see `products`.
    """
    rows, stack = x.get_tensor(ROWS), kernel.get_tensor(ROWS if backward else COLUMNS)
    if _have_block_scales(rows, stack):
        return grouped_block_gemm(rows, stack, group_sizes, dtype, features_first=backward)
    scales = _scales(rows, stack)
    if scales is None:
        return grouped_gemm(
            rows.dequantize(), stack.dequantize(), group_sizes, dtype, features_first=backward
        )
    # The codes of both directions end in the contracted axis.
    exact = backward or env.flag("NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION")
    return grouped_gemm(
        rows.codes, stack.codes, group_sizes, dtype, scales, features_first=True, exact=exact
    )


def _contract_rows(x: Any, dy: Any, group_sizes: Array, dtype: Any) -> Array:
    """Compute dkernel [G, K, N]: (rows of group g in x).T @ (rows of group g in dy)."""
    if _have_block_scales(x, dy):
        return grouped_block_contraction(x, dy, group_sizes, dtype)
    scales = _scales(x, dy)
    a, b = (tensor.dequantize() if scales is None else tensor.codes for tensor in (x, dy))
    return grouped_contraction(a, b, group_sizes, dtype, scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped_dense(
    x: Array, kernel: Array, group_sizes: Array, quantizer_set: QuantizerSet, spec: RowsSpec
) -> Array:
    return _forward(x, kernel, group_sizes, quantizer_set, spec)[0]


def _forward(
    x: Array, kernel: Array, group_sizes: Array, quantizers: QuantizerSet, spec: RowsSpec
) -> tuple[Array, tuple[Any, ...]]:
    of = x, kernel
    if not quantizers.is_noop:
        (x, kernel), quantizers = constant((of, quantizers))
    x_codes, x_amax = _encode(quantizers.x, x, group_sizes, spec)
    kernel_codes, kernel_amax = _encode(quantizers.kernel, kernel, None)
    y = _multiply_rows(x_codes, kernel_codes, group_sizes, x.dtype, backward=False)
    saved = codes_to_bits((x_codes.get_tensor(COLUMNS), kernel_codes.get_tensor(ROWS)))
    if not quantizers.is_noop:
        y = undifferentiated(y, of)
    return y, (saved, jax.tree.map(like, of), group_sizes, quantizers, (x_amax, kernel_amax))


def _backward(spec: RowsSpec, residuals: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    saved, (x_like, kernel_like), group_sizes, quantizers, amaxes = residuals
    x_codes, kernel_codes = bits_to_codes(saved)
    of = dy, x_like, kernel_like
    if not quantizers.is_noop:
        dy = constant(dy)
    codes, amax = _encode(quantizers.dgrad, dy, group_sizes, spec)
    dx = _multiply_rows(codes, kernel_codes, group_sizes, x_like.dtype, backward=True)
    dkernel = _contract_rows(
        x_codes.get_tensor(COLUMNS), codes.get_tensor(COLUMNS), group_sizes, kernel_like.dtype
    )
    states = (quantizers.x, quantizers.kernel, quantizers.dgrad)
    following = groups_advanced_together(states, (*amaxes, amax), spec.mesh_axes)
    gradients = (dx, dkernel)
    if not quantizers.is_noop:
        gradients = undifferentiated(gradients, of)
    return *gradients, as_cotangent(group_sizes), as_cotangent(QuantizerSet(*following))


_grouped_dense.defvjp(_forward, _backward)
