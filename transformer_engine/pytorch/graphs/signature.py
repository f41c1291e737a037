"""Call signatures: a graph serves every call whose signature equals the signature of the captured call.

A signature holds everything that a capture freezes, except tensor values.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...common import env
from ...common.numbers import with_article
from ...common.recipe import recipe_description
from ..quantization.autocast import AutocastState
from ..runtime.checks import MODULE_HOOKS
from ..runtime.determinism import torch_determinism
from ..runtime.device import autocast_dtype
from ..tensor.quantized_tensor import QuantizedTensorStorage

# Non-tensor argument types. Equal values with one type are interchangeable.
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)

# The bookkeeping in torch.nn.Module. From these only parameters, buffers, children and the mode belong to a signature.
_BOOKKEEPING = frozenset(vars(torch.nn.Module()))
PLAIN_TYPES = frozenset((*CONSTANTS, complex, bytes, torch.memory_format, torch.layout))
# Layer attributes in this package that are not in their `_config` and that a capture freezes.
_OUTSIDE_CONFIG = ("forward", "score_mod")


class ArgumentLeaves(NamedTuple):
    """Flattened arguments (args, kwargs) of a call; `constants` is None at tensor positions.

    Attributes:
        structure: Pytree structure of (args, kwargs).
        tensors: Tensor leaves.
        positions: Leaf indices of the tensors.
        constants: All leaves, with None in place of tensors.
    """

    structure: pytree.TreeSpec
    tensors: tuple[Tensor, ...]
    positions: tuple[int, ...]
    constants: tuple[Any, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentLeaves:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        positions = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
        return ArgumentLeaves(
            structure,
            tuple([leaves[i] for i in positions]),
            positions,
            tuple([None if isinstance(leaf, Tensor) else leaf for leaf in leaves]),
        )


class SameObject:
    """A signature part that equals only the same object.

    Signatures keep weak references where possible, so that they do not keep objects alive. CPython has one plain weak
    reference per object, and a later object at the same address has another.
    """

    __slots__ = ("key",)

    def __init__(self, value: object) -> None:
        try:
            self.key: object = weakref.ref(value)
        except TypeError:
            self.key = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.key is other.key

    def __hash__(self) -> int:
        return id(self.key)


class Standing(NamedTuple):
    """State of a module when it is called, or the reason that the call cannot be captured.

    Attributes:
        facts: Layer settings, and addresses of layer parameters and buffers, as signature parts.
        obstacle: The reason as a sentence, or None.
    """

    facts: tuple[Any, ...]
    obstacle: str | None


def unsupported_leaf_reason(leaves: ArgumentLeaves) -> str | None:
    """Return the reason why no graph could serve a call with these arguments, or None."""
    for leaf in leaves.constants:
        if not isinstance(leaf, CONSTANTS):
            return f"an argument is of type {type(leaf).__name__}, whose present content a graph would keep"
    for tensor in leaves.tensors:
        if isinstance(tensor, QuantizedTensorStorage) or type(tensor) not in (
            Tensor,
            torch.nn.Parameter,
        ):
            return f"an argument is {with_article(type(tensor))}; graphs take plain tensors"
    return None


def module_standing(module: torch.nn.Module | None) -> Standing:
    """Return the standing of a module, read from all of its layers because writes to a layer are not reported."""
    if module is None:
        return Standing((), None)
    facts: list[Any] = []
    visited: set[int] = set()
    waiting = [module]
    while waiting:
        layer = waiting.pop()
        attributes = layer.__dict__
        if layer is not module and any(attributes[kind] for kind in MODULE_HOOKS):
            return Standing(
                (), f"{with_article(type(layer))} inside has hooks, which a replay would not call"
            )
        if attributes.get("wgrad_store") is not None:
            return Standing(
                (), f"{with_article(type(layer))} puts weight gradients off until its backward_dw()"
            )
        facts.append(_layer(layer, visited, 1))
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            facts.append(
                None if tensor is None else (tensor_addresses(tensor), tensor.requires_grad)
            )
        waiting += [child for child in attributes["_modules"].values() if child is not None]
    return Standing(tuple(facts), None)


def _layer(layer: torch.nn.Module, visited: set[int], depth: int) -> tuple[Any, ...]:
    """Return a layer without its parameters, buffers and children as a signature part."""
    attributes = layer.__dict__
    config = attributes.get("_config")
    if config is None:
        names = attributes.keys() - _BOOKKEEPING
    elif _is_ours(type(layer).forward):
        # The forward reads the record and these; attributes that callers add have no effect.
        names = [name for name in _OUTSIDE_CONFIG if attributes.get(name) is not None]
    else:
        # The private attributes are this package's caches and states.
        names = [name for name in attributes.keys() - _BOOKKEEPING if not name.startswith("_")]
    settings = [
        (name, type(attributes[name]), attributes[name])
        if type(attributes[name]) in PLAIN_TYPES
        else (name, _fact(attributes[name], visited, depth))
        for name in names
    ]
    # A weak reference equals only one to the same layer, and is hashed and compared faster than a SameObject.
    return weakref.ref(layer), type(layer), attributes["training"], config, frozenset(settings)


def _is_ours(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("transformer_engine.")


def _fact(value: Any, visited: set[int], depth: int) -> Any:
    """Return a value as a signature part.

    Numbers, text and containers of them count by value, tensors by address and layout, other
    objects by identity. For depth > 0, the attributes of an object count too, such as those in a
    model configuration. Callables and objects of this package count by identity only.

    Args:
        value: A layer attribute, or an element of one.
        visited: Ids of the containers and objects that the signature includes already; they count by identity.
        depth: How many object levels are read.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return kind, value
    if isinstance(value, Tensor):
        # A forward pass result, such as an auxiliary loss, is overwritten by each replay.
        if value.grad_fn is not None:
            return kind
        return kind, tensor_addresses(value), value.shape, value.dtype, value.requires_grad
    if id(value) in visited:
        return SameObject(value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset([_fact(element, visited, depth) for element in value])
    if isinstance(value, (list, tuple, dict, torch.nn.Module)):
        visited.add(id(value))
    if isinstance(value, (list, tuple)):
        return kind, tuple([_fact(element, visited, depth) for element in value])
    if isinstance(value, dict):
        pairs = value.items()
        return kind, tuple(
            [(_fact(key, visited, depth), _fact(element, visited, depth)) for key, element in pairs]
        )
    if depth == 0:
        return SameObject(value)
    if isinstance(value, torch.nn.Module):
        return _layer(value, visited, depth - 1)
    if callable(value) or _is_ours(kind):
        return SameObject(value)
    visited.add(id(value))
    attributes = getattr(value, "__dict__", {})
    return SameObject(value), tuple(
        [(name, _fact(attributes[name], visited, depth - 1)) for name in attributes]
    )


def tensor_addresses(tensor: Tensor) -> Any:
    """Return the address of a tensor, or the part addresses of a quantized tensor."""
    if isinstance(tensor, QuantizedTensorStorage):
        parts: Sequence[Tensor | None] = tensor.as_storage().flatten()[0]
        return tuple([None if part is None else part.data_ptr() for part in parts])
    return tensor.data_ptr()


def call_signature(
    leaves: ArgumentLeaves, status: Standing, state: AutocastState, caches: bool
) -> tuple[Any, ...]:
    """Return the signature of a call."""
    kinds = {tensor.device.type for tensor in leaves.tensors}
    return (
        leaves.structure,
        leaves.positions,
        tuple([(type(leaf), leaf) for leaf in leaves.constants]),
        tuple([(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in leaves.tensors]),
        status.facts,
        caches,
        (
            state.enabled,
            state.calibrating,
            type(state.recipe),
            recipe_description(state.recipe),
            state.group,
        ),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple([autocast_dtype(kind) for kind in sorted(kinds)]),
        torch_determinism(),
        env.generation(),
    )
