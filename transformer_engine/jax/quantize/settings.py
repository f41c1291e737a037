"""Checks and conversions of the settings of quantizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import described, epsilon, exponent, member, one_of, switch, text_or_none
from ...common.formats import E2M1, E4M3, E5M2, Element
from ..checks import check_array, check_dtype
from .scaling_modes import AmaxComputeAlgo, QuantizeLayout, ScalingMode

_ELEMENTS: dict[Any, Element] = {
    jnp.dtype(jnp.float8_e4m3fn): E4M3,
    jnp.dtype(jnp.float8_e5m2): E5M2,
    jnp.dtype(jnp.float4_e2m1fn): E2M1,
}


def element_of(dtype: Any) -> Element:
    """The element that a dtype holds; ValueError for one that is not narrow."""
    found = check_dtype("q_dtype", dtype)
    element = _ELEMENTS.get(found)
    if element is None:
        raise ValueError(
            f"q_dtype={found.name} holds no codes; choose one of {', '.join(d.name for d in _ELEMENTS)}"
        )
    return element


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "q_dtype": lambda name, value: element_of(value),
    "scaling_mode": lambda name, value: member(name, value, ScalingMode),
    "q_layout": lambda name, value: member(name, value, QuantizeLayout),
    "data_layout": lambda name, value: one_of(name, value, ("NN", "NT", "TN", "TT")),
    "checkpoint_name": text_or_none,
    "power_of_two": switch,
    "epsilon": epsilon,
    "margin": exponent,
    "amax_compute_algo": lambda name, value: member(name, value, AmaxComputeAlgo),
    "use_rht": switch,
    "four_over_six": lambda name, value: one_of(name, value, ("", "MAE", "MSE")),
    "scale": lambda name, value: _check_state(name, value, jnp.floating),
    "amax_history": lambda name, value: _check_state(name, value, jnp.floating),
    "stochastic_rounding_rng_state": lambda name, value: (
        None if value is None else _check_state(name, value, jnp.unsignedinteger)
    ),
}


def _check_state(name: str, value: Any, kind: Any) -> None:
    """TypeError or ValueError unless a state is an array of at least one axis that holds numbers of this kind."""
    check_array(name, value)
    if not jnp.issubdtype(value.dtype, kind) or jnp.dtype(value.dtype).itemsize < 2 or not value.ndim:
        wanted = "float32" if kind is jnp.floating else "uint32, such as jax.random.key_data(key)"
        raise ValueError(f"{name} is {described(value)}; give an array [n] of {wanted}")


def _check_pair(scale: Any, history: Any) -> None:
    """ValueError unless there is a scale a history: [1] and [length], or [.., n] or [.., n, 1] and [.., n, length]."""
    of = tuple(history.shape[:-1])
    if not history.shape[-1] or tuple(scale.shape) not in (of, (*of, 1)):
        raise ValueError(
            f"scale has shape {list(scale.shape)} and amax_history {list(history.shape)}; give one scale a history, "
            "such as [1] and [1024]"
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """ValueError or TypeError unless settings, by their names, are such as a quantizer has."""
    for name, value in settings.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    if "amax_history" in settings:
        _check_pair(settings["scale"], settings["amax_history"])


def key_of(words: Array) -> Array:
    """Return the random key of raw data: the data of a `jax.random` key, or any number of words, which are all used."""
    words = words.reshape(-1).astype(jnp.uint32)
    size = jax.random.key_data(jax.random.key(0)).size
    if words.size == size:
        return jax.random.wrap_key_data(words)
    key = jax.random.key(0)
    for place in range(words.size):
        key = jax.random.fold_in(key, words[place])
    return key
