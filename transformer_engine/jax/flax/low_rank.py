"""y += (x @ a @ b) * alpha / rank: low-rank kernel adaptation (arXiv:2106.09685) over any axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import described, whole
from ...common.warning import warn_once
from .base import parameter


def _normalize_axes(axes: Iterable[int], ndim: int) -> tuple[int, ...]:
    """Convert negative axes to non-negative."""
    return tuple(axis if axis >= 0 else ndim + axis for axis in axes)


def _canonicalize_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(value, str):  # whose letters would be the numbers
        raise TypeError(
            f"{value!r} must be a whole number or several; give an int or a tuple of ints"
        )
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _apply_low_rank_adaptation(
    x: Array,
    axis: int | Iterable[int],
    features: int | Iterable[int],
    lora_a_kernel: Array,
    lora_b_kernel: Array,
    alpha: float | None,
) -> Array:
    """Compute x @ a @ b * alpha / rank for x [.., *contracted] -> [.., *features]; alpha None: without the factor."""
    axis = _normalize_axes(_canonicalize_tuple(axis), x.ndim)
    features = _canonicalize_tuple(features)
    uncontracted = [d for d in range(x.ndim) if d not in axis]
    # Einsum labels: x's axes, then the leading features, the rank and the last feature.
    leading = list(range(x.ndim, x.ndim + len(features) - 1))
    rank, last = x.ndim + len(leading), x.ndim + len(leading) + 1
    down = jnp.einsum(
        x,
        list(range(x.ndim)),
        lora_a_kernel.astype(x.dtype),
        [*axis, *leading, rank],
        [*uncontracted, *leading, rank],
    )
    up = jnp.einsum(
        down,
        [*uncontracted, *leading, rank],
        lora_b_kernel.astype(x.dtype),
        [*leading, rank, last],
        [*uncontracted, *leading, last],
    )
    return up if alpha is None else up * (alpha / lora_b_kernel.shape[-2])


def low_rank_term(
    module: nn.Module,
    prefix: str,
    x: Array,
    axis: tuple[int, ...],
    features: Sequence[int],
    init: Callable[..., Array],
    rank: int,
    alpha: float | None,
) -> Array:
    """Compute the low-rank term of a product, with the module's prefixed `lora_a_kernel` and `lora_b_kernel`."""
    whole("low_rank_adaptation_dim", rank)
    # a [*contracted, *features except the last, rank], b [*features except the last, rank, last].
    shapes = (
        (*[x.shape[d] for d in axis], *features[:-1], rank),
        (*features[:-1], rank, features[-1]),
    )
    dtype = module.dtype
    a, b = (
        parameter(module, f"{prefix}lora_{name}_kernel", draw, (None,) * len(shape), shape, dtype)
        for name, draw, shape in (("a", init, shapes[0]), ("b", nn.initializers.zeros, shapes[1]))
    )
    return _apply_low_rank_adaptation(x, axis, tuple(features), a, b, alpha)


@dataclass(frozen=True)
class LoRAScope:
    """Switches for the query, key and value projections, for the output projection, and for the MLP.

    Attributes:
        qkv_proj: Whether the query, key and value projections are adapted.
        output_proj: Whether the output projection is adapted.
        mlp: Whether the MLP is adapted.
    """

    qkv_proj: bool = False
    output_proj: bool = False
    mlp: bool = False


_SCOPES = {
    "none": LoRAScope(),
    "all": LoRAScope(qkv_proj=True, output_proj=True, mlp=True),
    "qkv_proj": LoRAScope(qkv_proj=True),
    "output_proj": LoRAScope(output_proj=True),
    "mlp": LoRAScope(mlp=True),
    "exclude_qkv_proj": LoRAScope(qkv_proj=False, output_proj=True, mlp=True),
    "exclude_output_proj": LoRAScope(qkv_proj=True, output_proj=False, mlp=True),
    "exclude_mlp": LoRAScope(qkv_proj=True, output_proj=True, mlp=False),
}


def _canonicalize_lora_scope(scope: str | None) -> LoRAScope:
    """Switches for a scope name; None means "none", and so does an unknown scope, with a warning."""
    name = "none" if scope is None else str(scope).lower()
    if name not in _SCOPES:
        warn_once(
            "low_rank_adaptation_scope",
            f"low_rank_adaptation_scope={described(scope)} is unknown and adapts nothing; known scopes are "
            f"{', '.join(_SCOPES)}",
            stacklevel=4,
        )
        return LoRAScope()
    return _SCOPES[name]
