"""All settings that a caller may change between two layer calls, found by inspection, not in a list.

`attributes(name)` are a layer's public settings; `other_values` finds values for each, by trying a pool of
values on the constructor; `recipe_changes` and `variables` are the recipe fields and our environment
variables.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from transformer_engine.common import env
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import QuantizerRole
from transformer_engine.pytorch.primitives.activation import ACTIVATIONS

from . import layers

# Attributes that are not changed here, with the reason.
NOT_CHANGED = {
    "activation_params": "a record, whose fields tests/module/test_changed_settings.py changes",
    "bias_names": "made by the constructor, as the parameters are",
    "cp_group": "needs ranks",
    "fp8_meta": "the original's bookkeeping, which its callers read",
    "fp8_meta_tensors_initialized": "whether there are quantizers, not a setting",
    "get_rng_state_tracker": "needs ranks",
    "heads": "follows from the sizes",
    "inter_attention": "a child or None",
    "k_norm": "a child or None",
    "key_value": "a child or None",
    "layernorm": "a child or None",
    "layernorm_qkv": "a child or None",
    "layernorm_query": "a child or None",
    "numerics": "the owner of fp8_meta and quantizers, no setting",
    "param_init_meta": "read by reset_parameters, which reads it anew",
    "q_norm": "a child or None",
    "quantizers": "tests/quantization/test_custom_quantizers.py",
    "query_layer": "a child or None",
    "tp_group": "needs ranks",
    "tracing_key": "the layer's own name for compilers",
    "weight_names": "made by the constructor, as the parameters are",
    "wgrad_store": "delayed weight gradients, which hold tensors",
}
# Attributes whose constructor argument has another name.
ARGUMENTS = {"use_bias": "bias", "head_dim_qk": "kv_channels", "ffn_shard": "ffn_hidden_size"}

WORDS = (
    "LayerNorm",
    "RMSNorm",
    *ACTIVATIONS,
    "no_mask",
    "padding",
    "causal",
    "causal_bottom_right",
    "padding_causal",
    "arbitrary",
    "vanilla",
    "off-by-one",
    "learnable",
    "sbhd",
    "bshd",
    "thd",
    "self",
    "cross",
    "encoder",
    "decoder",
    "column",
    "row",
    "p2p",
    "all_gather",
    "a2a",
    "L2Normalization",
    "two_shot",
)


def halve_score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """A score_mod."""
    return score * 0.5


ROLE = QuantizerRole("linear", "output", "somewhere")
POOL = (
    True,
    False,
    0.5,
    0.25,
    1,
    2,
    3,
    32,
    (2, 0),
    (4, 0),
    *WORDS,
    "a name",
    halve_score,
    ROLE,
    None,
)


def attributes(name: str) -> list[str]:
    """Public names that a caller can read and write on a layer, except children and parameters."""
    layer = layers.make_layer(name)
    ours = [cls for cls in type(layer).__mro__ if cls.__module__.startswith("transformer_engine")]
    settable = {
        key
        for cls in ours
        for key, member in vars(cls).items()
        if isinstance(member, property) and member.fset is not None
    }
    contents = {key for key, value in vars(layer).items() if not callable(value)}
    children = {*layer._modules, *layer._parameters, *layer._buffers}
    return sorted(
        key
        for key in (contents | settable) - children - set(NOT_CHANGED)
        if not key.startswith("_")
    )


def constructor_argument(name: str, attribute: str) -> str | None:
    """Name of the constructor argument that an attribute stores, or None."""
    selection = inspect.signature(layers.NAMES[name].__init__).parameters
    argument = ARGUMENTS.get(attribute, attribute)
    return argument if argument in selection else None


def other_values(name: str, attribute: str, most: int = 3) -> Iterator[Any]:
    """Yield other values of an attribute, from the pool if the constructor accepts them, otherwise of the same type."""
    present = getattr(layers.make_layer(name), attribute)
    argument = constructor_argument(name, attribute)
    result = 0
    for value in POOL:
        if result == most or (isinstance(present, bool) and not isinstance(value, bool)):
            return
        if value == present or (value is None and present is not None):
            continue
        if argument is None:
            takes = type(value) is type(present) and not isinstance(value, str)
            takes = takes or (present is None and value is ROLE and attribute.endswith("_role"))
        else:
            takes = _constructs(name, argument, value)
        if takes:
            result += 1
            yield value


@functools.cache
def _constructs(name: str, argument: str, value: Any) -> bool:
    try:
        layers.make_layer(name, **{argument: value})
    except (
        AttributeError,
        AssertionError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return False  # the pool is tried on every argument; most of it means nothing to this one
    return True


def recipe_changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """(field, the recipe with another value in it), for every field that has another value."""
    for field in dataclasses.fields(recipe):  # pyright: ignore[reportArgumentType]
        present = getattr(recipe, field.name)
        for value in _others(present):
            try:
                yield field.name, dataclasses.replace(recipe, **{field.name: value})  # pyright: ignore
            except (TypeError, ValueError):
                continue


def _others(present: Any) -> Iterator[Any]:
    """Yield values with the same type as `present`; for a record, copies with one field changed."""
    if isinstance(present, bool):
        yield not present
    elif isinstance(present, enum.Enum):
        yield from (member for member in type(present) if member is not present)
    elif isinstance(present, (int, float)):
        yield present + 1
        yield present + type(present)(3)
    elif isinstance(present, str):
        yield from (
            word
            for word in ("none", "all", "weights", "activations", "max", "MAE", "MSE")
            if word != present
        )
    elif dataclasses.is_dataclass(present):
        for field in dataclasses.fields(present):
            for value in _others(getattr(present, field.name)):
                yield dataclasses.replace(present, **{field.name: value})  # pyright: ignore[reportArgumentType]
    elif present is None:
        yield from ("high_precision", "dequantized")


def variables() -> Iterator[tuple[str, str]]:
    """(name, a possible text) for every environment variable of ours that something reads."""
    for row in env.VARIABLES.values():
        if row.meaning.startswith("Accepted"):
            continue
        if row.choices is not None:
            yield from ((row.name, choice) for choice in row.choices if choice != row.default)
        elif row.kind is bool:
            yield from (
                (row.name, text)
                for text in ("0", "1")
                if row.default is None or row.parse(text) != row.default
            )
        elif row.kind is int:
            yield row.name, str(int(row.default or 0) + 2)


def outcome(layer: torch.nn.Module, recipe: Recipe | None) -> list[torch.Tensor] | str:
    """A call's results, or its error text."""
    try:
        return layers.results(layer, recipe)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def agree(first: list[torch.Tensor] | str, second: list[torch.Tensor] | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return layers.same(first, second)


def write_attribute(layer: torch.nn.Module, attribute: str, value: Any) -> str | None:
    """Write an attribute. Return the error text if the write is rejected, otherwise None."""
    try:
        setattr(layer, attribute, value)
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None


def copy_shared_state(layer: torch.nn.Module, fresh: torch.nn.Module) -> None:
    """Load the parameters and scaling states that both layers have into `fresh`; RuntimeError for other shapes."""
    saved = layer.state_dict()
    present = {key: saved[key] for key in fresh.state_dict() if key in saved}
    if any(name not in present for name, _ in fresh.named_parameters()):
        raise RuntimeError("the change brings parameters")
    fresh.load_state_dict(present, strict=False)
