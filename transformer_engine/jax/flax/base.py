"""Base class of all modules: the quantizers for their products, and the quantizers' state in a collection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import tracers
from jax import Array

from ...common.checks import (
    described,
    function,
    function_or_none,
    number_or_none,
    switch,
    text_or_none,
)
from ...common.recipe import Recipe
from ..quantize.config import QuantizeConfig, get_global_quantize_recipe
from ..quantize.factory import QuantizeMeta, QuantizeMetaSet, QuantizerFactory
from ..quantize.quantizers import QuantizerSet, noop_quantizer_set
from ..quantize.sharing import one_and_rest
from ..runtime.checks import check_axis_names, check_floating, check_values
from ..sharding import get_sharding_map_logic_axis_to_mesh_axis

Initializer = Callable[..., Array]
Axes = tuple[str | None, ...]
_TENSORS = ("x", "kernel", "grad")


def parameter(
    module: nn.Module, name: str, init: Initializer, axes: Axes, shape: Sequence[int], dtype: Any
) -> Array:
    """Create the module's parameter `name`, boxed with its axis names; () or one name per axis."""
    check_axis_names(f"axes of {name}", axes, len(shape))
    if dtype is not None:
        check_floating("dtype", dtype)
    if any(isinstance(extent, int) and extent == 0 for extent in shape):
        raise ValueError(
            f"{name} would have shape {tuple(shape)}; give inputs whose last axis, or those of `axis`, have elements"
        )
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), dtype)
    return value


_KINDS: dict[str, Callable[[str, Any], object]] = {
    "bool": switch,
    "bool | None": switch,
    "float | None": number_or_none,
    "Initializer": function,
    "Initializer | None": function_or_none,
}


def check_call(module: nn.Module, **arrays: Any) -> None:
    """Raise TypeError unless arrays hold values, and the module's switches, initializers and names have these types.

    Field annotations determine the types: a switch that is not a bool ("False", an array) would count as True.
    """
    for name, array in arrays.items():
        check_values(name, array)
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if (check := _KINDS.get(str(field.type))) is not None:
            check(field.name, value)
        elif field.name.endswith("_name") and str(field.type) in ("str", "str | None"):
            text_or_none(field.name, value)


def kernel_initializer(
    init: Initializer | None, dtype: Any, distribution: Any = "truncated_normal"
) -> Initializer:
    """The `init` argument, by default variance_scaling(1.0, "fan_in", distribution)."""
    return (
        nn.initializers.variance_scaling(1.0, "fan_in", distribution, dtype=dtype)
        if init is None
        else init
    )


@dataclass(frozen=True, eq=False)
class _Unread:
    """A state copy for further calls to its module, and the original's collection, name and value."""

    trace: Any
    leaves: list[Array]
    rest: QuantizerSet


def _check_state(name: str, leaf: Any, extents: tuple[int | None, ...]) -> None:
    """Raise TypeError or ValueError unless a state leaf is float32 with these extents; None: at least one."""
    dtype, shape = getattr(leaf, "dtype", type(leaf).__name__), tuple(getattr(leaf, "shape", ()))
    if dtype != jnp.float32:
        raise TypeError(
            f"{name} is {dtype}; states are float32 for every dtype of parameters, exclude them when you cast"
        )
    if len(shape) != len(extents) or any(
        n == 0 if m is None else n != m for n, m in zip(shape, extents, strict=True)
    ):
        expected = ", ".join("length" if m is None else str(m) for m in extents)
        raise ValueError(
            f"{name} has shape {list(shape)}, not [{expected}]; give the state that init made or a gradient returned"
        )


_of_step: ContextVar[list[_Unread] | None] = ContextVar(
    "transformer_engine_jax_unread_states", default=None
)


@contextmanager
def one_step() -> Iterator[None]:
    """Give every model call in this block, within one differentiated function, its own copy of the state."""
    token = _of_step.set([])
    try:
        yield
    finally:
        _of_step.reset(token)


class TransformerEngineBase(nn.Module):
    """A Flax module whose products are quantized by the recipe of the surrounding autocast."""

    def generate_quantizer_set(
        self,
        postfix: str = "",
        variable_collection: str | None = None,
        quantization_checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        n_groups: int | None = None,
    ) -> QuantizerSet:
        """Create the quantizers for one product in this module.

        Args:
            postfix: Distinguishes the states for several products.
            variable_collection: Collection that holds the states; None: "fp8_metas".
            quantization_checkpoint_name: Name for the codes in recomputation policies.
            fp8_recipe: Recipe instead of autocast's.
            n_groups: Number of groups in a grouped product, each with a separate state.

        A history with another length than in the recipe keeps its length.
        """
        config = QuantizeConfig(get_global_quantize_recipe() if fp8_recipe is None else fp8_recipe)
        if config.recipe is None:
            return noop_quantizer_set
        collection = config.COLLECTION_NAME if variable_collection is None else variable_collection
        metas = {
            tensor: self._quantizer_state(tensor, postfix, collection, config, n_groups)
            for tensor in _TENSORS
        }
        quantizers: Any = QuantizerFactory.create_set(
            fp8_recipe=config.recipe,
            quantize_meta_set=QuantizeMetaSet(**metas),
            checkpoint_name=quantization_checkpoint_name,
            n_groups=n_groups,
        )
        if not config.stateful or self.is_initializing():
            return quantizers
        return self._choose_call_states(quantizers)

    def _choose_call_states(self, quantizers: QuantizerSet) -> QuantizerSet:
        """Copy the set for this call: the next states from all calls to a module are merged, see `fan_out`.

        Calls in another JAX transformation than the first (jit or grad within the model) are not merged with it.
        """
        # Stored on the root scope: Flax recreates submodules of a compact method in each call.
        assert self.scope is not None, "a module is called with a scope"
        of_apply: list[_Unread] = vars(self.scope.root).setdefault("_unread_states", [])
        of_step = _of_step.get()
        unread = of_apply if of_step is None else of_step
        trace, leaves = tracers.current_trace(), jax.tree.leaves(quantizers)
        earlier = next(
            (
                state
                for state in unread
                if (
                    state.trace == trace
                    and len(state.leaves) == len(leaves)
                    and all(a is b for a, b in zip(state.leaves, leaves, strict=True))
                )
            ),
            None,
        )
        one, rest = one_and_rest(quantizers if earlier is None else earlier.rest)
        if earlier is not None:
            unread.remove(earlier)
        unread.append(_Unread(trace, leaves, rest))
        return one

    def _quantizer_state(
        self,
        tensor: str,
        postfix: str,
        collection: str,
        config: QuantizeConfig,
        n_groups: int | None,
    ) -> QuantizeMeta:
        if config.stateful:
            name, length = f"{tensor}{postfix}", config.AMAX_HISTORY_LEN
            if not (
                self.has_variable(collection, f"{name}_scale")
                or self.is_mutable_collection(collection)
            ):
                raise ValueError(
                    f'the collection "{collection}" has no {name}_scale for {"/".join(self.path) or "the model"}; call '
                    f'init under this recipe, and apply with its state: {{"params": .., "{collection}": ..}}'
                )
            shape, steps = (
                ((1,), (length,)) if n_groups is None else ((n_groups,), (n_groups, length))
            )
            scale = self.variable(collection, f"{name}_scale", jnp.ones, shape, jnp.float32)
            history = self.variable(
                collection, f"{name}_amax_history", jnp.zeros, steps, jnp.float32
            )
            of = f'of {"/".join(self.path) or "the model"} in "{collection}"'
            _check_state(f"{name}_scale {of}", scale.value, shape)
            _check_state(f"{name}_amax_history {of}", history.value, (*steps[:-1], None))
            return QuantizeMeta(scale=scale.value, amax_history=history.value)
        if config.random and tensor == "grad":
            key = self.make_rng("sr_rng")
            data = (
                jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
            )
            return QuantizeMeta(stochastic_rounding_rng_state=data)
        return QuantizeMeta()


Rules = Sequence[tuple[str, str | None]]


def extend_logical_axis_rules(rules: Rules) -> tuple[tuple[str, str | None], ...]:
    """The rules, followed by a rule for each axis name in transformer_engine.jax.sharding.

    Args:
        rules: Pairs (logical axis, mesh axis or None).

    Raises:
        TypeError: The rules are not name pairs.
        ValueError: A rule contradicts the MeshResource.
    """
    ours = get_sharding_map_logic_axis_to_mesh_axis()
    extended: list[tuple[str, str | None]] = []
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise TypeError(
            f"rules={described(rules)}; give a sequence of pairs of an axis name and a mesh axis"
        )
    for rule in rules:
        if (
            not isinstance(rule, (tuple, list))
            or len(rule) != 2
            or not isinstance(rule[0], str)
            or not (rule[1] is None or isinstance(rule[1], str))
        ):
            raise TypeError(
                f"rules hold {described(rule)}; give pairs of an axis name and a mesh axis or None"
            )
        name, axis = rule
        if name in ours and ours[name] != axis:
            raise ValueError(
                f"rules map {name!r} to {axis!r}, the MeshResource to {ours[name]!r}; leave the rule out"
            )
        extended.append((name, axis))
    names = {name for name, _ in extended}
    return (*extended, *((name, axis) for name, axis in ours.items() if name not in names))
