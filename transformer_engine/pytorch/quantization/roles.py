"""Roles, the arguments of a custom recipe's factory, and requests, which the factory may return for a quantizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.recipe import DelayedScaling, Format

MODES = ("forward", "backward")
FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


class QuantizerRole(str):
    """The module tensor that a quantizer is for, passed to the factory of a custom recipe.

    A role equals the string "linear_" + tensor_type, with which earlier factories compare it. Two roles are equal when
    all three fields are.

    Args:
        module_type: "linear", "grouped_linear" or "dpa"; "" if unknown.
        tensor_type: "input", "weight", "output", "grad_output" or "grad_input"; for an attention
            "qkv", "s", "do" or "dp".
        name: Module name, or "". Attention results end in ".dpa_output" and ".dpa_grad_input".
    """

    module_type: str
    tensor_type: str
    name: str

    def __new__(cls, module_type: str = "", tensor_type: str = "", name: str = "") -> QuantizerRole:
        return cls._create(f"linear_{tensor_type}", module_type, tensor_type, name)

    @classmethod
    def _create(
        cls, text: str, module_type: str = "", tensor_type: str = "", name: str = ""
    ) -> Any:
        role = super().__new__(cls, text)
        role.module_type = module_type
        role.tensor_type = tensor_type
        role.name = name
        return role

    def _key(self) -> tuple[str, str, str]:
        return (self.module_type, self.tensor_type, self.name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, QuantizerRole):
            return self._key() == other._key()
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __str__(self) -> str:
        """ "module_type=..|tensor_type=..|name=..", with the fields that are set."""
        fields = zip(("module_type", "tensor_type", "name"), self._key(), strict=True)
        return "|".join(f"{name}={value}" for name, value in fields if value) or "QuantizerRole()"

    def __repr__(self) -> str:
        return f"QuantizerRole({self.module_type!r}, {self.tensor_type!r}, {self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuantizerRole._create, (self[:], *self._key()))


class QuantizerRequest:
    """Base class for requests, which a factory returns for a quantizer whose state the module owns."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Request for a quantizer with delayed scaling. Slots with equal requests share one maxima history.

    Args:
        fp8_format: Forward and backward formats.
        margin: Powers of two between the scaled maximum and the largest code.
        amax_history_len: Step count in the history.
        amax_compute_algo: "max", "most_recent" or callable(history [len, n]) -> amax [n].
        scaling_factor_compute_algo: Callable(amax, old_scale, fp8_max, recipe) -> scale.
        reduce_amax: Take the maximum over the amax_reduction_group of `autocast`.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(**vars(self), backward_override=None)


def tensor_types(mode: str, count: int, roles: Sequence[QuantizerRole | None] | None) -> list[str]:
    """Return each slot's tensor, from its role or by position: [input, weight, output], [grad_output, grad_input]."""
    tensors = FORWARD_TENSORS if mode == "forward" else BACKWARD_TENSORS
    by_position = [tensors[slot % len(tensors)] for slot in range(count)]
    if roles is None:
        return by_position
    return [
        position if role is None or role.tensor_type not in tensors else role.tensor_type
        for role, position in zip(roles, by_position, strict=True)
    ]


def factory_roles(
    mode: str, count: int, roles: Sequence[QuantizerRole | None] | None
) -> list[QuantizerRole | None]:
    """Return a custom recipe's factory arguments, slot by slot: the module's roles, which may be None.

    Without module roles, warn, and use roles without fields.
    """
    if roles is not None:
        return list(roles)
    if not torch.compiler.is_compiling():
        warnings.warn(
            "a custom recipe's factory is called with empty roles, because the module has no roles; "
            "override get_quantizer_roles(fwd=, num_quantizers=) in the module's class",
            UserWarning,
            stacklevel=2,
        )
    # Roles without fields; earlier factories compare the string.
    return [QuantizerRole._create(f"linear_{tensor}") for tensor in tensor_types(mode, count, None)]
