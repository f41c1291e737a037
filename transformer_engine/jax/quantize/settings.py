"""Checks and conversions for quantizer settings, and the delayed-scaling scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import (
    check_option,
    described,
    epsilon,
    exponent,
    member,
    switch,
    text_or_none,
)
from ...common.formats import E2M1, E4M3, E5M2, Element
from ..primitives.scale_update import advance_scales
from ..runtime.checks import check_array, check_dtype
from .scaling_modes import AmaxComputeAlgo, QuantizeLayout, ScalingMode

_ELEMENTS: dict[Any, Element] = {
    jnp.dtype(jnp.float8_e4m3fn): E4M3,
    jnp.dtype(jnp.float8_e5m2): E5M2,
    jnp.dtype(jnp.float4_e2m1fn): E2M1,
}


def find_element(dtype: Any) -> Element:
    """Element type for a code dtype; raise ValueError for another dtype."""
    q_dtype = check_dtype("q_dtype", dtype)
    element = _ELEMENTS.get(q_dtype)
    if element is None:
        raise ValueError(
            f"q_dtype={q_dtype.name} holds no codes; choose one of {', '.join(d.name for d in _ELEMENTS)}"
        )
    return element


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "q_dtype": lambda name, value: find_element(value),
    "scaling_mode": lambda name, value: member(name, value, ScalingMode),
    "q_layout": lambda name, value: member(name, value, QuantizeLayout),
    "data_layout": lambda name, value: check_option(name, value, ("NN", "NT", "TN", "TT")),
    "checkpoint_name": text_or_none,
    "power_of_two": switch,
    "epsilon": epsilon,
    "margin": exponent,
    "amax_compute_algo": lambda name, value: member(name, value, AmaxComputeAlgo),
    "use_rht": switch,
    "four_over_six": lambda name, value: check_option(name, value, ("", "MAE", "MSE")),
    "scale": lambda name, value: _check_state(name, value, jnp.floating),
    "amax_history": lambda name, value: _check_state(name, value, jnp.floating),
    "stochastic_rounding_rng_state": lambda name, value: (
        None if value is None else _check_state(name, value, jnp.unsignedinteger)
    ),
}


def _check_state(name: str, value: Any, kind: Any) -> None:
    """Raise TypeError or ValueError unless a state is an array with this number type and at least one axis."""
    check_array(name, value)
    if (
        not jnp.issubdtype(value.dtype, kind)
        or jnp.dtype(value.dtype).itemsize < 2
        or not value.ndim
    ):
        expected = "float32" if kind is jnp.floating else "uint32, such as jax.random.key_data(key)"
        raise ValueError(f"{name} is {described(value)}; give an array [n] of {expected}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless settings, by their names, are valid for a quantizer."""
    for name, value in settings.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    if "amax_history" in settings:
        scale, history = settings["scale"], settings["amax_history"]
        shape = tuple(history.shape[:-1])
        # One scale per history: [1] and [length], or [.., n] or [.., n, 1] and [.., n, length].
        if not history.shape[-1] or tuple(scale.shape) not in (shape, (*shape, 1)):
            raise ValueError(
                f"scale has shape {list(scale.shape)} and amax_history {list(history.shape)}; "
                "give one scale a history, such as [1] and [1024]"
            )


def random_key(words: Array) -> Array:
    """Build the random key from raw data: a `jax.random` key's data, or any number of words, which are all used."""
    words = words.reshape(-1).astype(jnp.uint32)
    size = jax.random.key_data(jax.random.key(0)).size
    if words.size == size:
        return jax.random.wrap_key_data(words)
    key = jax.random.key(0)
    for index in range(words.size):
        key = jax.random.fold_in(key, words[index])
    return key


def compute_scale_from_amax(
    amax: Array, q_dtype: Any, margin: float = 0.0, scale: Array | None = None
) -> Array:
    """Compute the delayed-scaling scale, (max of q_dtype / amax) / 2^margin, as float32 [1].

    Args:
        amax: Absolute maximum, a number or a one-element array.
        q_dtype: Code dtype.
        margin: Exponent of the margin.
        scale: Result if amax is 0, infinite or NaN, with 1 replacing 0; None means 1.
    """
    exponent("margin", margin)
    amax = _one_number("amax", amax)
    old = jnp.ones(1, jnp.float32) if scale is None else _one_number("scale", scale)
    _, computed = advance_scales(
        jnp.zeros((1, 1), jnp.float32),
        old,
        amax,
        "most_recent",
        (find_element(q_dtype).maximum,),
        margin,
    )
    return computed


def _one_number(name: str, value: Any) -> Array:
    """Convert a number to float32 [1]; raise TypeError unless value is one real number, or a one-element array."""
    dtype = getattr(value, "dtype", None)
    kinds = (jnp.floating, jnp.integer)
    real = (
        isinstance(value, Real)
        if dtype is None
        else any(jnp.issubdtype(dtype, kind) for kind in kinds)
    )
    if not real or np.size(value) != 1:
        raise TypeError(f"{name}={described(value)}; give one number, or an array [1] of it")
    return jnp.asarray(value, jnp.float32).reshape(1)
