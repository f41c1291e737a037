"""Expert activations: the result is multiplied by a scale per row, the token's expert probability."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ....common.numbers import to_bool, to_float
from ...primitives.activation import ActivationParams
from ...runtime.warn_once import warn_once
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from .activation import ActivationOperation, ClampedSwiGLU, bound, interleave_size


class ScaledActivation(ActivationOperation):
    """y = f(x) * scales[.., None], with the scales as extra input in the leading dimensions of x.

    The backward pass computes f(x) again for the scale gradient, the sum of dy * f(x) over the last dimension.
    """

    scaled = True
    num_extra_inputs = 1

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ):
        super().__init__()
        self.activation_recompute_in_mlp = to_bool(
            "activation_recompute_in_mlp", activation_recompute_in_mlp
        )
        self.glu_interleave_size = interleave_size(glu_interleave_size)


class _ScaledGLU(ScaledActivation):
    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ):
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        if self.activation_recompute_in_mlp:
            raise ValueError(
                f"activation_recompute_in_mlp=True is unsupported by {type(self).__name__}; only ScaledSReLU within a "
                "fused grouped MLP recomputes its activation"
            )


class ScaledSwiGLU(_ScaledGLU):
    """y = a * sigmoid(a) * b * scales for x = [a, b].

    Args:
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.
        activation_recompute_in_mlp: Must be False.

    Raises:
        ValueError: `activation_recompute_in_mlp` is True.
    """

    kind = "swiglu"


class ScaledClampedQGeGLU(_ScaledGLU):
    """`ClampedSwiGLU` multiplied by scales.

    Args:
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.
        activation_recompute_in_mlp: Must be False.
        limit: Bound for the gate and the linear half.
        alpha: Factor within the sigmoid.
        glu_linear_offset: Offset for the linear half.

    Raises:
        ValueError: `activation_recompute_in_mlp` is True.
    """

    kind = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        # A child, because checkpoints of the original have its extra state.
        self._clamped = ClampedSwiGLU(
            limit=to_float("limit", limit),
            alpha=to_float("alpha", alpha),
            glu_linear_offset=to_float("glu_linear_offset", glu_linear_offset),
            glu_interleave_size=glu_interleave_size,
        )

    def call_facts(self, extra_inputs: tuple[Tensor, ...]) -> Hashable:
        return self._clamped._revision

    def activation_params(self) -> ActivationParams:
        return self._clamped.activation_params()


class ScaledSiTUGLU(_ScaledGLU):
    """`SiTUGLU` multiplied by scales.

    Args:
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.
        activation_recompute_in_mlp: Must be False.
        beta1: Gate bound.
        beta2: Linear half bound.

    Raises:
        ValueError: `activation_recompute_in_mlp` is True, or a bound is not a finite number greater than 0.
    """

    kind = "situ_glu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        self.beta1, self.beta2 = bound("beta1", beta1), bound("beta2", beta2)

    def constants(self) -> tuple[float, float]:
        return self.beta1, self.beta2


class ScaledSReLU(ScaledActivation):
    """y = max(x, 0)^2 * scales.

    Args:
        activation_recompute_in_mlp: Only a fused grouped MLP computes the activation again in its
            backward pass. Outside it a warning states that the argument has no effect.
    """

    kind = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        if self.activation_recompute_in_mlp:
            warn_recompute(self)
        return super().passes(x, call)


def warn_recompute(op: Any) -> None:
    """Warn, once per class, that no fused grouped MLP recomputes an activation here."""
    warn_once(
        f"activation_recompute_in_mlp of {type(op).__name__}",
        f"activation_recompute_in_mlp=True of {type(op).__name__} has no effect without a fused grouped MLP; the input "
        "of the activation is saved",
    )
