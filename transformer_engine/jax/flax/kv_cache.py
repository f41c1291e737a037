"""Cached keys and values for earlier tokens: a decoding step adds one token and attends to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from ..runtime.checks import is_known


@dataclass(frozen=True)
class KeyValueCache:
    """The variables `cached_key`, `cached_value` and `cache_index` in a module's collection "cache".

    Attributes:
        filled: Whether they existed before this call. The call that creates them sets their length without using them.
        axis: Token axis: 1, or 0 if the sequence is the first axis.
    """

    key: Any
    value: Any
    index: Any
    filled: bool
    axis: int

    @classmethod
    def of(cls, module: nn.Module, key: Array, value: Array, axis: int) -> KeyValueCache:
        """Get the cache for a module called with decode=True; raise ValueError unless a step is one token."""
        filled = module.has_variable("cache", "cached_key")
        cache = cls(
            module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            module.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32)),
            filled,
            axis,
        )
        if filled:
            cache._check(key, value)
        return cache

    @property
    def length(self) -> int:
        return self.key.value.shape[self.axis]

    @property
    def position(self) -> Array | int:
        """Position of this call's first token in the sequence."""
        return self.index.value if self.filled else 0

    def extended(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Append this step's keys and values to the cache, and return the full cache.

        A step after the end of the cache raises an error if the index is known, and results in NaN if it is traced.
        """
        position = self.index.value
        key, value = (
            jnp.where(position < self.length, x, jnp.asarray(jnp.nan, x.dtype))
            for x in (key, value)
        )
        self.key.value = lax.dynamic_update_slice_in_dim(self.key.value, key, position, self.axis)
        self.value.value = lax.dynamic_update_slice_in_dim(
            self.value.value, value, position, self.axis
        )
        self.index.value = position + 1
        return self.key.value, self.value.value

    def hidden(self, window: tuple[int, int] | None) -> Array:
        """Mask [1, 1, 1, length], True for a token that is hidden from this step: later ones, and by its window."""
        distance = self.position - jnp.arange(self.length)
        hidden = distance < 0
        if window is not None and window[0] >= 0:
            hidden = hidden | (distance > window[0])
        return hidden[None, None, None]

    def _check(self, key: Array, value: Array) -> None:
        for name, array, cached in (
            ("key", key, self.key.value),
            ("value", value, self.value.value),
        ):
            expected = tuple(1 if axis == self.axis else n for axis, n in enumerate(cached.shape))
            if array.shape != expected:
                raise ValueError(
                    f"decode=True with a {name} of shape {array.shape}; a step has one token, {expected}; the cache is "
                    f"made for {self.length} tokens by init with decode=True"
                )
            if array.dtype != cached.dtype:
                raise TypeError(
                    f"decode=True with a {name} of {array.dtype} and a cache of {cached.dtype}; give inputs of "
                    "the dtype that init had"
                )
        index = self.index.value
        if is_known(index) and int(index) >= self.length:
            raise ValueError(
                f"cache_index={int(index)}: the cache of {self.length} tokens is full; begin with a fresh one, or "
                "make a longer one by init"
            )
