"""score_mod: scores [b, h, q, k] -> scores, a function in jnp operations between the scaled product and the softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.checks import described, function_or_none
from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout

ScoreMod = Callable[[Array, Any], Array]


def check_score_mod(
    score_mod: object,
    score_mod_bprop: object,
    tensors: tuple[object, object],
    layout: QKVLayout,
    bias: AttnBiasType,
    mask: AttnMaskType,
    softmax: AttnSoftmaxType,
    others: dict[str, object],
) -> None:
    """Raise an error unless score_mod is the only modifier: it replaces masks, biases, windows, sinks and dropout."""
    check_functions(score_mod, score_mod_bprop, *tensors)
    if score_mod is None:
        return
    if layout is not QKVLayout.BSHD_BSHD_BSHD:
        raise ValueError(f"score_mod with qkv_layout={layout.name}; it needs BSHD_BSHD_BSHD")
    given = {"attn_bias_type": bias, "attn_mask_type": mask, "softmax_type": softmax}
    plain = (AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, AttnSoftmaxType.VANILLA_SOFTMAX)
    for (name, value), wanted in zip(given.items(), plain, strict=True):
        if value is not wanted:
            raise ValueError(
                f"score_mod with {name}={value.name}; set it to {wanted.name}, and let score_mod do it"
            )
    for name, value in others.items():
        if value:
            raise ValueError(
                f"score_mod with {name}={described(value)}; leave it out, and let score_mod do it"
            )
    for name, called in (("score_mod", score_mod), ("score_mod_bprop", score_mod_bprop)):
        if called is not None:
            _check_parameters(name, called, 2 if name == "score_mod" else 3)


def check_functions(
    score_mod: object, score_mod_bprop: object, tensors: object, bprop_tensors: object
) -> None:
    """Raise an error unless both are functions or None, and tensors are only given together with their function."""
    function_or_none("score_mod", score_mod)
    function_or_none("score_mod_bprop", score_mod_bprop)
    for given, value, reader, function in (
        ("score_mod_bprop", score_mod_bprop, "score_mod", score_mod),
        ("score_mod_tensors", tensors, "score_mod", score_mod),
        ("score_mod_bprop_tensors", bprop_tensors, "score_mod_bprop", score_mod_bprop),
    ):
        if function is None and jax.tree.leaves(value):
            raise ValueError(f"{given}={described(value)} without {reader}; give both, or neither")


def _check_parameters(name: str, called: Any, most: int) -> None:
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:
        return  # a function of C has no signature; its result is checked
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in (0, 1)
    ]
    if len(required) > most:
        wanted = "(scores, tensors)" if most == 2 else "(gradient, scores, tensors)"
        raise NotImplementedError(
            f"{name} has {len(required)} parameters, as a builder of cuDNN graphs has; give a function {wanted} in "
            "jnp operations"
        )


def _like(name: str, made: Any, scores: Array) -> Array:
    """Return the result of a function of scores, in their dtype; raise an error unless it has the scores' shape."""
    if (
        not isinstance(made, Array)
        or made.shape != scores.shape
        or not jnp.issubdtype(made.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{name} returned {described(made)} for scores of shape {list(scores.shape)} and {scores.dtype}; return an "
            "array of that shape that holds floating-point numbers"
        )
    return made.astype(scores.dtype)


def modifier(
    score_mod: ScoreMod, score_mod_bprop: Callable[..., Array] | None, tensors: Any, bprop_tensors: Any
) -> Callable[[Array], Array]:
    """Return scores -> score_mod(scores, tensors), differentiated by JAX in scores and tensors.

    With score_mod_bprop, the gradient of the scores is score_mod_bprop(gradient, scores, bprop_tensors), and the
    tensors have none.
    """

    def scored(scores: Array) -> Array:
        return _like("score_mod", score_mod(scores, tensors), scores)

    if score_mod_bprop is None:
        return scored
    modified = jax.custom_vjp(scored)

    def forward(scores: Array) -> tuple[Array, Array]:
        return scored(scores), scores

    def backward(scores: Array, gradient: Array) -> tuple[Array]:
        return (_like("score_mod_bprop", score_mod_bprop(gradient, scores, bprop_tensors), scores),)

    modified.defvjp(forward, backward)
    return modified
