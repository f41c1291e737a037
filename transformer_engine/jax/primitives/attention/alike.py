"""The arrays of one attention for a library's call on several devices: batches and heads of all of them cut alike.

jax's call of cuDNN refuses queries, keys and values that lie otherwise than each other, takes tokens whole, and reads
lengths as they lie. XLA's partitioner lays each array as its maker likes: of a layer whose tokens are cut, otherwise.
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
from .triton_kernels import head_factors

_CUT = ("b", "g")


@dataclass(frozen=True)
class Alike(Kernel):
    """Arrays -> the same arrays, cut along batches b and groups g of heads alone.

    axes      the factors of every array's axes
    groups    heads of keys; members: heads of queries that share one
    """

    axes: tuple[str, ...]
    groups: int
    members: int

    @property
    def rule(self) -> str:
        # What is not to be cut has another name behind the arrow: Shardy carries a cut over wherever names agree.
        made = (
            re.sub(r"\w+", lambda name: name[0] if name[0] in _CUT else f"{name[0]}o", one)
            for one in self.axes
        )
        return f"{', '.join(self.axes)} -> {', '.join(made)}"

    @property
    def sizes(self) -> dict[str, int]:
        return {"g": self.groups, "r": self.members, "ro": self.members}

    @property
    def replicated(self) -> tuple[str, ...]:
        return tuple(sorted(set(re.findall(r"\w+", self.rule)).difference(_CUT)))

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Alike, tuple[bool, ...]]:
        axes = (
            f"v{place} {a}" if is_mapped else a
            for place, (a, is_mapped) in enumerate(zip(self.axes, mapped, strict=True))
        )
        return replace(self, axes=tuple(axes)), tuple(mapped)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        return arrays


Bias = Array | None


def alike(
    query: Array, key: Array, value: Array, bias: Bias, lengths: tuple[Array, ...]
) -> tuple[Array, Array, Array, Bias, tuple[Array, ...]]:
    """What is given: query [b, s, h, d], key and value [b, t, g, d], bias [1 or b, 1 or h, s, t], lengths [b, ..].

    Differentiable: gradients lie as what they are of. For programs that are lowered for CUDA.
    """
    made: Any = _alike(query, key, value, bias, lengths)
    return made


@jax.custom_vjp
def _alike(query: Array, key: Array, value: Array, bias: Bias, lengths: tuple[Array, ...]) -> Any:
    return _laid(query, key, value, bias, lengths)


def _laid(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias,
    lengths: tuple[Array, ...],
    primals: tuple[Array, ...] = (),
) -> tuple[Array, Array, Array, Bias, tuple[Array, ...]]:
    """primals   query, key, value and bias, as which the arrays are laid"""
    groups, members = key.shape[2], query.shape[2] // key.shape[2]
    heads = head_factors(groups, members)
    three = (f"b s {heads} d", "b t g d", "b t g e")
    added: tuple[str, ...] = ()
    if bias is not None:
        added = (f"{'i' if bias.shape[0] == 1 else 'b'} {'j' if bias.shape[1] == 1 else heads} s t",)
    others = tuple("b" if x.ndim == 1 else f"b n{place}" for place, x in enumerate(lengths))
    axes = (*three, *added, *others, *(three + added if primals else ()))
    given = (query, key, value, *(() if bias is None else (bias,)), *lengths, *primals)
    q, k, v, *rest = call(Alike(axes, groups, members), *given)
    laid = rest.pop(0) if bias is not None else None
    return q, k, v, laid, tuple(rest[: len(lengths)])


def _forward(
    query: Array, key: Array, value: Array, bias: Bias, lengths: tuple[Array, ...]
) -> tuple[Any, Any]:
    made = _laid(query, key, value, bias, lengths)
    return made, tuple(array for array in made[:4] if array is not None)


def _backward(primals: tuple[Array, ...], gradients: Any) -> tuple[Any, ...]:
    dq, dk, dv, dbias, _ = gradients
    return (*_laid(dq, dk, dv, dbias, (), primals)[:4], None)


_alike.defvjp(_forward, _backward)


def apart(out: Array, groups: int) -> Array:
    """out [b, s, h, e], that keeps its readers' cuts of tokens from the attention, and those of its makers too."""
    made: Any = _apart(out, groups)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apart(out: Array, groups: int) -> Array:
    members = out.shape[2] // groups
    return call(Alike((f"b s {head_factors(groups, members)} e",), groups, members), out)[0]


_apart.defvjp(
    lambda out, groups: (apart(out, groups), None), lambda groups, _, gradient: (apart(gradient, groups),)
)
