"""Activations and gated linear units as operations, scaled row by row for experts or not.

Gated units split the last dimension: y [.., F] = f(x[.., :F]) * x[.., F:]. With `glu_interleave_size` blocks of both
halves alternate instead, in the input and in its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ....common.numbers import to_bool, to_float, to_int
from ....common.passes.step import Step
from ....common.passes.vocabulary import Activation as ActivationSettings
from ....common.passes.vocabulary import Named
from ...primitives.activation import ACTIVATIONS, ActivationParams
from ...tensor.float8_tensor import Float8CurrentScalingQuantizer
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..step_operation import StepOperation
from .basic_linear import DTYPES

_SITU = "situ_glu"


@dataclass(frozen=True)
class ActivationContribution(Contribution):
    """Steps of an activation.

    Attributes:
        kind: Name of the activation.
        constants: Constants of SiTUGLU.
        convert: Dtype that the input is converted to; None if it has the right one.
        convert_gradient: Dtype that the gradient is converted to.
        interleave: Size of the alternating blocks of a gated unit; None for halves.
        cached: The input is saved quantized.
        scaled: The result is multiplied by a scale per row, an extra input.
        grad_scales: The gradient of the scales is needed.
    """

    kind: str
    constants: tuple[float, float] | None = None
    convert: torch.dtype | None = None
    convert_gradient: torch.dtype | None = None
    interleave: int | None = None
    cached: bool = False
    scaled: bool = False
    grad_scales: bool = False

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.matrix(steps.converted(x, self.convert))
        if self.interleave is not None:
            blocks = (-1, 2, self.interleave)
            x = Value(steps.one("block_order", (x.name,), f"{name}.halves", blocks), x.leading)
        y = self._activation(steps, name, x.name, f"{name}.y")
        saved = x.name
        if self.cached:
            saved = steps.one("quantize_values", (x.name,), f"{name}.cached", Named(name, "cached"))
        if not self.scaled:
            return ForwardPart(Value(y, x.leading), (saved,))
        scales = f"{name}.extra0"
        scaled = steps.one("row_scale", (y, scales), f"{name}.scaled")
        return ForwardPart(Value(scaled, x.leading), (saved, scales))

    def _activation(self, steps: PassBuilder, name: str, x: str, y: str) -> str:
        if self.constants is not None:
            return steps.one("situ_glu", (x,), y, self.constants)
        return steps.one("activation", (x,), y, ActivationSettings(name, self.kind))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        dy = steps.matrix(dy)
        x = kept.saved[0]
        assert x is not None
        if self.cached:
            x = steps.one("values", (x,), f"{name}.x_read")
        x = steps.rows(x)
        gradient, extra = dy.name, ()
        if self.scaled:
            y = self._activation(steps, name, x, f"{name}.y_again")
            scaled, scales = f"{name}.dy_scaled", f"{name}.dscales"
            steps.steps.append(Step("row_scale_backward", (dy.name, y, kept.saved[1]), (scaled, scales)))
            gradient, extra = scaled, (Value(scales) if self.grad_scales else None,)
        if self.constants is not None:
            dx = steps.one("situ_glu_backward", (gradient, x), f"{name}.dx", self.constants)
        else:
            dx = steps.one(
                "activation_backward", (gradient, x), f"{name}.dx", ActivationSettings(name, self.kind)
            )
        if self.interleave is not None:
            dx = steps.one("block_order", (dx,), f"{name}.dx_blocks", (2, -1, self.interleave))
        return BackwardPart(steps.converted(Value(dx, dy.leading), self.convert_gradient), (), extra)


class ActivationOperation(StepOperation):
    """Base of activations: y = f(x), computed in float32 and rounded to the dtype of the input.

    Args:
        cache_quantized_input: Save the input for the backward pass as FP8 (E4M3) codes with one scale, in a quarter to
            half of the memory.

    Raises:
        RuntimeError: In the forward pass, an input that is not float32, float16 or bfloat16.
    """

    kind: str
    scaled = False

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = to_bool("cache_quantized_input", cache_quantized_input)
        self.glu_interleave_size: int | None = None

    def constants(self) -> tuple[float, float] | None:
        """Return the constants of SiTUGLU; None for activations of the table."""
        return None

    def activation_params(self) -> ActivationParams:
        """Return the constants of a clamped unit; other activations ignore them."""
        return ActivationParams()

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        dtype = call.autocast or x.dtype
        kind = type(self).__name__
        if dtype not in DTYPES:
            raise RuntimeError(
                f"{kind} takes float32, float16 or bfloat16 inputs, not {dtype}; convert the input"
            )
        gated = self.kind == _SITU or ACTIVATIONS[self.kind].gated
        width = x.shape[-1]
        if gated and width % (2 * (self.glu_interleave_size or 1)):
            raise ValueError(
                f"{kind} splits the last dimension into two halves, so it must be a multiple of "
                f"{2 * (self.glu_interleave_size or 1)} (2 * glu_interleave_size); the input has {width}"
            )
        shape = (*x.shape[:-1], width // 2 if gated else width)
        if self.scaled:
            rows, given = math.prod(x.shape[:-1]), math.prod(call.extra[0].shape)
            if rows != given:
                raise ValueError(
                    f"{kind} takes one scale per row, but got scales {list(call.extra[0].shape)} for an input "
                    f"{list(x.shape)}; give scales of shape {list(x.shape[:-1])}"
                )
        environment.activations[name] = (self.kind, self.activation_params())
        cached = self.cache_quantized_input and call.saves
        if cached:
            environment.objects[name, "cached"] = Float8CurrentScalingQuantizer(
                torch.float8_e4m3fn, x.device, rowwise=True, columnwise=False
            )
        convert = None if dtype == x.dtype else dtype
        contribution = ActivationContribution(
            self.kind,
            self.constants(),
            convert,
            None if convert is None else x.dtype,
            self.glu_interleave_size,
            cached,
            self.scaled,
            self.scaled and call.saves,
        )
        return contribution, InputFacts(shape, dtype, x.device)


def interleave_size(size: Any) -> int | None:
    """Return the size of alternating blocks of a gated unit, or None.

    Raises:
        ValueError: The size is less than 1.
    """
    return None if size is None else to_int("glu_interleave_size", size, 1)


class GELU(ActivationOperation):
    """y = gelu(x), in the approximation by tanh (arXiv:1606.08415)."""

    kind = "gelu"


class GEGLU(ActivationOperation):
    """y = gelu(a) * b for x = [a, b] (arXiv:2002.05202)."""

    kind = "geglu"


class GLU(ActivationOperation):
    """y = sigmoid(a) * b for x = [a, b] (arXiv:1612.08083)."""

    kind = "glu"


class QGELU(ActivationOperation):
    """y = x * sigmoid(1.702 x)."""

    kind = "qgelu"


class QGEGLU(ActivationOperation):
    """y = a * sigmoid(1.702 a) * b for x = [a, b]."""

    kind = "qgeglu"


class ReLU(ActivationOperation):
    """y = max(x, 0)."""

    kind = "relu"


class ReGLU(ActivationOperation):
    """y = max(a, 0) * b for x = [a, b]."""

    kind = "reglu"


class SReLU(ActivationOperation):
    """y = max(x, 0)^2 (arXiv:2109.08668)."""

    kind = "srelu"


class SReGLU(ActivationOperation):
    """y = max(a, 0)^2 * b for x = [a, b]."""

    kind = "sreglu"


class SiLU(ActivationOperation):
    """y = x * sigmoid(x)."""

    kind = "silu"


class SwiGLU(ActivationOperation):
    """y = a * sigmoid(a) * b for x = [a, b] (arXiv:2002.05202).

    Args:
        cache_quantized_input: Save the input for the backward pass as FP8 codes.
        glu_interleave_size: The last dimension alternates blocks of this size of a and b; None for two halves.
    """

    kind = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = interleave_size(glu_interleave_size)


class ClampedSwiGLU(ActivationOperation):
    """y = g * sigmoid(alpha g) * (l + offset) for x = [a, b], with g = min(a, limit) and l = clamp(b, -limit, limit).

    Args:
        limit: Bound of the gate and of the linear half.
        alpha: Factor within the sigmoid.
        glu_linear_offset: Offset of the linear half.
        cache_quantized_input: Save the input for the backward pass as FP8 codes.
        glu_interleave_size: The last dimension alternates blocks of this size of a and b; None for two halves.
    """

    kind = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.limit, self.alpha = to_float("limit", limit), to_float("alpha", alpha)
        self.glu_linear_offset = to_float("glu_linear_offset", glu_linear_offset)
        self.glu_interleave_size = interleave_size(glu_interleave_size)

    def activation_params(self) -> ActivationParams:
        return ActivationParams(self.limit, self.alpha, self.glu_linear_offset)


class SiTUGLU(ActivationOperation):
    """y = beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) for x = [a, b].

    Args:
        beta1: Bound of the gate.
        beta2: Bound of the linear half.
        cache_quantized_input: Save the input for the backward pass as FP8 codes.
        glu_interleave_size: The last dimension alternates blocks of this size of a and b; None for two halves.

    Raises:
        ValueError: A bound is not a finite number greater than 0.
    """

    kind = _SITU

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.beta1, self.beta2 = bound("beta1", beta1), bound("beta2", beta2)
        self.glu_interleave_size = interleave_size(glu_interleave_size)

    def constants(self) -> tuple[float, float]:
        return self.beta1, self.beta2


def bound(name: str, value: Any) -> float:
    """Return a bound as a float; ValueError unless it is finite and greater than 0."""
    value = to_float(name, value)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}={value} must be a finite number greater than 0")
    return value
