"""State for modules that Flax's lifted transformations (`nn.remat`, `nn.jit`, ..) call several times in one apply.

A state's gradient is its next state, and JAX adds the gradients of an array that is read several times. A lifted call
reads the state of its modules in a separate trace, so a module inside cannot see the other calls. The state is
therefore boxed, as Flax boxes parameters with axis names: reading a boxed leaf returns the leaf, and passing it into a
transformation, which flattens the box, passes a copy. The gradients of the copies merge as in `fan_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from .quantizers import DelayedScaleQuantizer
from .sharing import one_and_rest, pairs_of_leaves

_COLLECTIONS = ("fp8_metas", "_overwrite_with_gradient")


class _Copies:
    """Lazily created copies of one state; copies that are not read cost nothing."""

    def __init__(self, scale: Array, history: Array):
        self._state, self._made = (scale, history), list[DelayedScaleQuantizer]()

    def __getitem__(self, index: int) -> DelayedScaleQuantizer:
        if not self._made:
            # Created lazily, so that the reading module reports a wrong shape. The code element type does not matter,
            # since nothing is quantized here.
            scale, history = self._state
            self._rest: Any = DelayedScaleQuantizer(
                jnp.dtype(jnp.float8_e4m3fn), scale=scale, amax_history=history
            )
        while len(self._made) <= index:
            state_copy, self._rest = one_and_rest(self._rest)
            self._made.append(state_copy)
        return self._made[index]


class _Box(nn.meta.AxisMetadata[Array]):
    """A state leaf. Each flattening yields another copy, and unflattening yields the leaf without a box."""

    def __init__(self, leaf: Array, copies: _Copies, name: str):
        self._leaf, self._copies, self._name, self._flattened = leaf, copies, name, 0

    def unbox(self) -> Array:
        return self._leaf

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> _Box:
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> _Box:
        return self

    def next_copy(self) -> Array:
        """Leaf of the next copy; a scale and its history are flattened together, and belong to one copy."""
        self._flattened += 1
        return getattr(self._copies[self._flattened - 1], self._name)


def _leaf(_: None, leaves: tuple[Any]) -> Any:
    return leaves[0]


jax.tree_util.register_pytree_node(_Box, lambda box: ((box.next_copy(),), None), _leaf)


@contextmanager
def merge_lifted_calls() -> Iterator[None]:
    """Merge the states from lifted calls: within this block, each lifted call reads its own state copy."""
    with nn.intercept_methods(_box_states):
        yield


def _box_states(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Box a model's state at its first method call in a trace; the scopes of its modules share the boxes."""
    scope: Any = context.module.scope
    if scope is not None:
        for name in _COLLECTIONS:
            state = scope.root._variables.get(name)
            if state and not scope.is_mutable_collection(name):
                leaves, tree = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, _Box))
                # A collection that is boxed already, or holds anything but float32 pairs, remains unchanged.
                if any(
                    isinstance(x, _Box) or getattr(x, "dtype", None) != jnp.float32 for x in leaves
                ):
                    continue
                for scale, history in pairs_of_leaves(state) or ():
                    copies = _Copies(leaves[scale], leaves[history])
                    leaves[scale] = _Box(leaves[scale], copies, "scale")
                    leaves[history] = _Box(leaves[history], copies, "amax_history")
                scope.root._variables[name] = jax.tree.unflatten(tree, leaves)
    return next_fun(*args, **kwargs)
