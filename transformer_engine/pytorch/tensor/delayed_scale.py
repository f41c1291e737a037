"""Scale and maximum of a delayed-scaling quantizer: separate tensors, or a slot in a recipe state."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .elements import check_scalar


class ScalingState(Protocol):
    """Delayed-scaling state for n tensors.

    Attributes:
        scale: Value multipliers [n] before rounding; while compiling, a copy.
        scale_in_place: The multipliers [n] that updates write.
        amax_history: Maxima [length, n]. Row 0 collects the running step; the other rows are complete steps, the oldest
            in row 1 and the newest in the last row.
    """

    @property
    def scale(self) -> Tensor: ...

    scale_in_place: Tensor

    amax_history: Tensor


class DelayedScale:
    """Mixin for quantizers that read their scale from, and record maxima in, the tensors of a recipe state."""

    _state: ScalingState | None
    _index: int
    _scale: Tensor | None
    _amax: Tensor | None
    _slot: Any

    @property
    def scale(self) -> Tensor:
        """float32 [1], the value multiplier: codes = round(x * scale), x = codes / scale."""
        if self._state is not None:
            return self._state.scale[self._index : self._index + 1]
        assert self._scale is not None
        return self._scale

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        """Use another tensor from now on; a quantizer in a recipe state no longer reads its scale from the state."""
        self._leave_state(scale, None if self._state is None and self._amax is None else self.amax)

    @property
    def amax(self) -> Tensor:
        """float32 [1]: max|x| over everything quantized since the owner reset it."""
        if self._state is not None:
            return self._state.amax_history[0, self._index : self._index + 1]
        assert self._amax is not None
        return self._amax

    @amax.setter
    def amax(self, amax: Tensor) -> None:
        """Record maxima in another tensor from now on; see `scale`."""
        self._leave_state(None if self._state is None and self._scale is None else self.scale, amax)

    def _leave_state(self, scale: Tensor | None, amax: Tensor | None) -> None:
        """Read and write these tensors instead of a slot in a recipe state."""
        check_scalar("scale", scale)
        check_scalar("amax", amax)
        self._scale, self._amax, self._state, self._slot = scale, amax, None, None
