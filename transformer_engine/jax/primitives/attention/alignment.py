"""Attention arrays whose batches and heads are sharded alike, for a library call on several devices.

JAX's cuDNN call requires queries, keys and values with equal shardings, and tokens that are not sharded. XLA's
partitioner keeps each array's producer sharding, which differs in a layer whose tokens are sharded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array

from ..kernels import Kernel, call
from ..partitioning import ShardingRule
from .triton_kernels import head_factors

_SHARDED = ("b", "g")


@dataclass(frozen=True)
class AlignShardings(Kernel):
    """Arrays -> the same arrays, sharded along batches b and head groups g only.

    Attributes:
        axes: Axis factors for every array.
        groups: Key heads.
        members: Query heads per key head.
    """

    axes: tuple[str, ...]
    groups: int
    members: int

    @property
    def rule(self) -> ShardingRule:
        # Factors that are not sharded have other names in the results: Shardy propagates shardings between equal names.
        outputs = (
            re.sub(
                r"\w+", lambda name: name[0] if name[0] in _SHARDED else f"{name[0]}o", axis_names
            )
            for axis_names in self.axes
        )
        text = f"{', '.join(self.axes)} -> {', '.join(outputs)}"
        replicated = tuple(sorted(set(re.findall(r"\w+", text)).difference(_SHARDED)))
        return ShardingRule(
            text, replicated, {"g": self.groups, "r": self.members, "ro": self.members}
        )

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[AlignShardings, tuple[bool, ...]]:
        axes = (
            f"v{index} {a}" if is_mapped else a
            for index, (a, is_mapped) in enumerate(zip(self.axes, mapped, strict=True))
        )
        return replace(self, axes=tuple(axes)), tuple(mapped)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        return arrays


Bias = Array | None


@jax.custom_vjp
def align(query: Array, key: Array, value: Array, bias: Bias, lengths: tuple[Array, ...]) -> Any:
    """Align the arguments' shardings; gradients are aligned too.

    The function is differentiable. It must be in a program that is lowered for CUDA.

    Args:
        query: [b, s, h, d].
        key: [b, t, g, d].
        value: [b, t, g, d].
        bias: [1 or b, 1 or h, s, t], or None.
        lengths: Arrays [b, ..].
    """
    return _align_shardings(query, key, value, bias, lengths)


def _align_shardings(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias,
    lengths: tuple[Array, ...],
    primals: tuple[Array, ...] = (),
) -> tuple[Array, Array, Array, Bias, tuple[Array, ...]]:
    """Align array shardings; primals: query, key, value and bias, with which gradients are aligned."""
    groups, members = key.shape[2], query.shape[2] // key.shape[2]
    heads = head_factors(groups, members)
    three = (f"b s {heads} d", "b t g d", "b t g e")
    added: tuple[str, ...] = ()
    if bias is not None:
        added = (
            f"{'i' if bias.shape[0] == 1 else 'b'} {'j' if bias.shape[1] == 1 else heads} s t",
        )
    bound_axes = tuple("b" if x.ndim == 1 else f"b n{index}" for index, x in enumerate(lengths))
    axes = (*three, *added, *bound_axes, *(three + added if primals else ()))
    operands = (query, key, value, *(() if bias is None else (bias,)), *lengths, *primals)
    q, k, v, *rest = call(AlignShardings(axes, groups, members), *operands)
    aligned_bias = rest.pop(0) if bias is not None else None
    return q, k, v, aligned_bias, tuple(rest[: len(lengths)])


def _forward(
    query: Array, key: Array, value: Array, bias: Bias, lengths: tuple[Array, ...]
) -> tuple[Any, Any]:
    aligned = _align_shardings(query, key, value, bias, lengths)
    return aligned, tuple(array for array in aligned[:4] if array is not None)


def _backward(primals: tuple[Array, ...], gradients: Any) -> tuple[Any, ...]:
    dq, dk, dv, dbias, _ = gradients
    return (*_align_shardings(dq, dk, dv, dbias, (), primals)[:4], None)


align.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def isolate(out: Array, groups: int) -> Array:
    """Isolate out [b, s, h, e], so that token shardings propagate neither from its readers nor to them."""
    members = out.shape[2] // groups
    return call(AlignShardings((f"b s {head_factors(groups, members)} e",), groups, members), out)[
        0
    ]


isolate.defvjp(
    lambda out, groups: (isolate(out, groups), None),
    lambda groups, _, gradient: (isolate(gradient, groups),),
)
