"""Scale update by a kernel from common/kernels/delayed_scaling.py: one launch computes up to six new states.

As XLA operations, updating three states took seven kernels, one microsecond each, a third of a small layer's
kernels. The kernel writes new arrays: an update in place made XLA copy every history and scale first, because callers
rarely donate them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import platform_failure, run
from ..partitioning import ShardingRule
from .reference import ScaleUpdateRequest

_LONGEST = 1 << 13  # steps that one program holds in registers
_STATES = 6  # per launch: `delayed_scaling.STATES`, whose file imports triton


def unsupported_reason(request: ScaleUpdateRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.length > _LONGEST:
        return f"a history of {request.length} steps; the kernel holds up to {_LONGEST}"
    return platform_failure(request.platform, "QuantizePrimitive")


@dataclass(frozen=True)
class AdvanceScales(Kernel):
    """Advance up to six delayed-scaling states by one step.

    Operands: the histories [length], then the scales [1], then this step's maxima [1]. Results: the new histories and
    the new scales.

    Attributes:
        takes_maximum: Whether a scale follows from the maximum of the history; otherwise from this step's maximum.
        maxima: Largest number in each state's element type.
        margin: Exponent of the margin.
        grouped: Whether the states have G groups: histories [G, length], scales and maxima [G].
    """

    takes_maximum: bool
    maxima: tuple[float, ...]
    margin: float
    grouped: bool = False

    @property
    def rule(self) -> ShardingRule:
        history, scale, amax = ("g h", "g", "g") if self.grouped else ("h", "s", "a")
        states = len(self.maxima)
        new = [*[history] * states, *[scale] * states]
        text = f"{', '.join([*new, *[amax] * states])} -> {', '.join(new)}"
        return ShardingRule(text, ("h",) if self.grouped else ("h", "s", "a"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        old = operands[: 2 * len(self.maxima)]
        return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in old)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import delayed_scaling

        states, length = len(self.maxima), arrays[0].shape[-1]
        groups = arrays[states].shape[0]
        launch = delayed_scaling.advance_new(
            length, self.takes_maximum, self.maxima, self.margin, groups
        )
        absent = [None] * (delayed_scaling.STATES - states)
        kinds = (arrays[start : start + states] for start in (0, states, 2 * states))
        results = run(launch, [array for kind in kinds for array in (*kind, *absent)])
        new = (array for array in results if array is not None)
        return tuple(array.reshape(old.shape) for array, old in zip(new, arrays, strict=False))


def advance(
    states: tuple[tuple[Array, Array, Array], ...],
    algorithm: str,
    maxima: tuple[float, ...],
    margin: float,
) -> tuple[tuple[Array, Array], ...]:
    """See `advance_states`."""
    updated: list[tuple[Array, Array]] = []
    for first in range(0, len(states), _STATES):
        some, theirs = states[first : first + _STATES], maxima[first : first + _STATES]
        arrays = [array for group in zip(*some, strict=True) for array in group]
        results = call(
            AdvanceScales(algorithm == "max", theirs, margin, arrays[0].ndim == 2), *arrays
        )
        updated += zip(results[: len(some)], results[len(some) :], strict=True)
    return tuple(updated)


BACKEND = Backend[ScaleUpdateRequest](
    "triton", unsupported_reason=unsupported_reason, bind=lambda request: advance
)
