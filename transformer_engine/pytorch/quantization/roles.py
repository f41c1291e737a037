"""What a custom recipe is asked with, and what it may answer besides a quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...common.recipe import DelayedScaling, Format

MODES = ("forward", "backward")
FORWARD_TENSORS = ("input", "weight", "output")
BACKWARD_TENSORS = ("grad_output", "grad_input")


class QuantizerRole(str):
    """Which tensor of which module a quantizer is for.

    It equals the string "linear_" + tensor_type, which earlier factories compare with; two roles are equal
    when all three fields are.
    """

    module_type: str
    tensor_type: str
    name: str

    def __new__(cls, module_type: str = "linear", tensor_type: str = "", name: str = "") -> QuantizerRole:
        role = super().__new__(cls, f"linear_{tensor_type}")
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

    def __repr__(self) -> str:
        return f"QuantizerRole({self.module_type!r}, {self.tensor_type!r}, {self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuantizerRole, self._key())


class QuantizerRequest:
    """What a factory returns for a quantizer whose state the module has to own."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A delayed-scaling quantizer; slots with equal requests share one amax history."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(
            margin=self.margin,
            fp8_format=self.fp8_format,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
            reduce_amax=self.reduce_amax,
            backward_override=None,
        )


def default_roles(mode: str, count: int) -> list[QuantizerRole]:
    """Roles by slot: [input, weight, output] a product forward, [grad_output, grad_input] backward."""
    tensors = FORWARD_TENSORS if mode == "forward" else BACKWARD_TENSORS
    return [QuantizerRole("linear", tensors[slot % len(tensors)]) for slot in range(count)]
