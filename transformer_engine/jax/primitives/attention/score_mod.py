"""score_mod: scores [b, h, q, k] -> scores, a function in jnp operations between the scaled product and the softmax.

Its required parameters determine the contract: (scores, tensors), NVIDIA's (graph, score, tensors), whose
operations `ScoreGraph` computes, or (score, b, h, q, kv, **tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.checks import described, function_or_none
from ....common.score_graph import ScoreGraph, required_parameters
from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout

ScoreMod = Callable[..., Array]


def check_score_mod(
    score_mod: object,
    score_mod_bprop: object,
    tensors: tuple[object, object],
    layout: QKVLayout,
    bias: AttnBiasType,
    mask: AttnMaskType,
    softmax: AttnSoftmaxType,
    other_settings: dict[str, object],
) -> None:
    """Raise an error unless score_mod is the only modifier: it replaces masks, biases, windows, sinks and dropout."""
    check_functions(score_mod, score_mod_bprop, *tensors)
    if score_mod is None:
        return
    if layout is not QKVLayout.BSHD_BSHD_BSHD:
        raise ValueError(f"score_mod with qkv_layout={layout.name}; it needs BSHD_BSHD_BSHD")
    settings = {"attn_bias_type": bias, "attn_mask_type": mask, "softmax_type": softmax}
    plain = (AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, AttnSoftmaxType.VANILLA_SOFTMAX)
    for (name, value), expected in zip(settings.items(), plain, strict=True):
        if value is not expected:
            raise ValueError(
                f"score_mod with {name}={value.name}; set it to {expected.name}, and let score_mod do it"
            )
    for name, value in other_settings.items():
        if value:
            raise ValueError(
                f"score_mod with {name}={described(value)}; leave it out, and let score_mod do it"
            )
    _check_parameters(score_mod, score_mod_bprop)  # pyright: ignore[reportArgumentType]


def check_functions(
    score_mod: object, score_mod_bprop: object, tensors: object, bprop_tensors: object
) -> None:
    """Raise an error unless both are functions or None, and tensors are only given together with their function."""
    function_or_none("score_mod", score_mod)
    function_or_none("score_mod_bprop", score_mod_bprop)
    for argument, value, reader, function in (
        ("score_mod_bprop", score_mod_bprop, "score_mod", score_mod),
        ("score_mod_tensors", tensors, "score_mod", score_mod),
        ("score_mod_bprop_tensors", bprop_tensors, "score_mod_bprop", score_mod_bprop),
    ):
        if function is None and jax.tree.leaves(value):
            raise ValueError(
                f"{argument}={described(value)} without {reader}; give both, or neither"
            )


_SCORES, _GRAPH, _INDICES = 2, 3, 5  # required positional parameters in the three contracts


def _contract(score_mod: ScoreMod) -> int:
    """Get the contract of a score_mod. Named tensors for index functions may be required parameters too."""
    count = required_parameters(score_mod)
    return _SCORES if count is None or count < _GRAPH else min(count, _INDICES)


def _check_parameters(score_mod: ScoreMod, score_mod_bprop: Callable[..., Array] | None) -> None:
    contract = _contract(score_mod)
    if contract not in (_SCORES, _GRAPH, _INDICES):
        raise TypeError(
            f"score_mod has {contract} required parameters; give a function of (scores, tensors), (graph, score, "
            "tensors) or (score, b, h, q, kv)"
        )
    count = None if score_mod_bprop is None else required_parameters(score_mod_bprop)
    if contract != _INDICES and count is not None and count > 3:
        signature = (
            "(gradient, scores, tensors)" if contract == _SCORES else "(graph, gradient, tensors)"
        )
        raise TypeError(
            f"score_mod_bprop has {count} required parameters; with this score_mod give a function of {signature}"
        )


def _like(name: str, result: Any, scores: Array) -> Array:
    """Cast the result of a score function to the scores' dtype; raise an error unless it has the scores' shape."""
    if (
        not isinstance(result, Array)
        or result.shape != scores.shape
        or not jnp.issubdtype(result.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{name} returned {described(result)} for scores of shape {list(scores.shape)} and "
            f"{scores.dtype}; return an array of that shape that holds floating-point numbers"
        )
    return result.astype(scores.dtype)


def modifier(
    score_mod: ScoreMod,
    score_mod_bprop: Callable[..., Array] | None,
    tensors: Any,
    bprop_tensors: Any,
) -> Callable[[Array], Array]:
    """Build scores -> modified scores [b, h, q, k], differentiated by JAX in scores and tensors.

    With score_mod_bprop, its result is the score gradient, and the tensors have none.

    Args:
        score_mod: Function with (scores, tensors), (graph, score, tensors) or (score, b, h, q, kv, **tensors).
        score_mod_bprop: Function with (gradient, scores, tensors), (graph, gradient, tensors) or (gradient, score, b,
            h, q, kv, **tensors), in the contract of score_mod; None for JAX's derivative.
        tensors: Arrays for score_mod; a name mapping, except for (scores, tensors).
        bprop_tensors: Arrays for score_mod_bprop, likewise.

    Raises:
        TypeError: Named arrays are not a mapping.
        ValueError: A graph's array does not broadcast to the scores.
    """
    contract = _contract(score_mod)
    if contract != _SCORES:
        tensors = _name_arrays("score_mod_tensors", tensors)
        bprop_tensors = _name_arrays("score_mod_bprop_tensors", bprop_tensors)

    def apply(scores: Array, tensors: Any) -> Array:
        if contract == _SCORES:
            result = score_mod(scores, tensors)
        elif contract == _GRAPH:
            graph = ScoreGraph(jnp, _score_indices(scores))
            result = score_mod(graph, scores, _broadcast("score_mod_tensors", tensors, scores))
        else:
            result = score_mod(scores, *_score_indices(scores), **tensors)
        return _like("score_mod", result, scores)

    if score_mod_bprop is None:
        return lambda scores: apply(scores, tensors)

    def differentiate(gradient: Array, scores: Array, tensors: Any, bprop_tensors: Any) -> Array:
        if contract == _SCORES:
            result = score_mod_bprop(gradient, scores, bprop_tensors)
        elif contract == _GRAPH:
            # score_mod_bprop may read arrays that score_mod computed, as in one graph
            apply(scores, tensors)
            graph = ScoreGraph(jnp, _score_indices(scores))
            arrays = _broadcast("score_mod_bprop_tensors", bprop_tensors, scores)
            result = score_mod_bprop(graph, gradient, arrays)
        else:
            result = score_mod_bprop(gradient, scores, *_score_indices(scores), **bprop_tensors)
        return _like("score_mod_bprop", result, scores)

    # Arrays are arguments to the custom derivative, which must not close over traced arrays; other leaves stay static.
    leaves, structure = jax.tree.flatten((tensors, bprop_tensors))
    traced = [isinstance(leaf, Array) for leaf in leaves]

    def join_arrays(arrays: list[Array]) -> Any:
        remaining = iter(arrays)
        return structure.unflatten(
            next(remaining) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        )

    modified = jax.custom_vjp(lambda scores, arrays: apply(scores, join_arrays(arrays)[0]))
    modified.defvjp(
        lambda scores, arrays: (apply(scores, join_arrays(arrays)[0]), (scores, arrays)),
        lambda saved, gradient: (differentiate(gradient, saved[0], *join_arrays(saved[1])), None),
    )
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    return lambda scores: modified(scores, arrays)


def _score_indices(scores: Array) -> tuple[Array, ...]:
    """Batch, head, query and key indices, int32, which broadcast with scores [b, h, q, k]."""
    return tuple(
        jnp.arange(size, dtype=jnp.int32).reshape(
            [-1 if axis == dimension else 1 for axis in range(4)]
        )
        for dimension, size in enumerate(scores.shape)
    )


def _name_arrays(name: str, tensors: Any) -> Mapping[str, Any]:
    """Named arrays as a mapping; empty for None."""
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{name}={described(tensors)} is not a mapping; give a dict of named arrays"
        )
    return tensors


def _broadcast(name: str, tensors: Mapping[str, Any], scores: Array) -> dict[str, Array]:
    """Broadcast a graph's arrays: one element as a scalar, others with 4 dimensions that broadcast to the scores."""
    arrays = {key: jnp.asarray(tensor) for key, tensor in tensors.items()}
    for key, array in arrays.items():
        if array.size == 1:
            arrays[key] = array.reshape(())
        elif array.ndim != 4 or any(
            size not in (1, expected)
            for size, expected in zip(array.shape, scores.shape, strict=True)
        ):
            raise ValueError(
                f"{name}[{key!r}] is {list(array.shape)}; give one element, or 4 dimensions that broadcast to "
                f"[batch, heads, queries, keys] = {list(scores.shape)}"
            )
    return arrays
