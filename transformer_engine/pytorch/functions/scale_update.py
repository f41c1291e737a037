"""The end of a backward pass under delayed scaling: gradient scales for the next step, from the amaxes just seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..quantization import FP8GlobalStateManager
from ..quantization.delayed_scaling import update_states


@dataclass(frozen=True)
class ScaleUpdate:
    """What a module's backward updates.

    states   its own backward states; without any, those of all modules, which only the backward that comes last
             may do. A compiled graph holds the former: when the first module is traced, the others have no states.
             Both give the same scales, because a state whose amax is zero is left as it is.
    group    ranks over which its own amaxes are reduced first
    """

    states: tuple[Any, ...] = ()
    group: Any = None

    def run(self) -> None:
        if not self.states:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        for state in self.states:
            update_states((state,), False, state.recipe, self.group)
