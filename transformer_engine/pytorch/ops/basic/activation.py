"""Activations and gated linear units as operations, scaled row by row for experts or not.

Gated units split the last dimension: y [.., F] = f(x[.., :F]) * x[.., F:]. With `glu_interleave_size` blocks of both
halves alternate instead, in the input and in its gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ....common.numbers import to_bool, to_float, to_int
from ...primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
)
from ...tensor.float8_tensor import Float8CurrentScalingQuantizer
from ..pass_operation import PassOperation
from ..passes.activation import ActivationPasses
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from .basic_linear import DTYPES

_SITU = "situ_glu"


class ActivationOperation(PassOperation):
    """Base class for activations: y = f(x), computed in float32 and rounded to the input dtype.

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
        """Return the constants of SiTUGLU; None for activations in the table."""
        return None

    def activation_params(self) -> ActivationParams:
        """Return the constants of a clamped unit; other activations ignore them."""
        return ActivationParams()

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        dtype = call.autocast or x.dtype
        kind = type(self).__name__
        if dtype not in DTYPES:
            raise RuntimeError(
                f"{kind} takes float32, float16 or bfloat16 inputs, not {dtype}; convert the input"
            )
        if not x.shape:
            raise ValueError(f"{kind} takes inputs with at least one dimension; use x.reshape(1)")
        gated = self.kind == _SITU or ACTIVATIONS[self.kind].gated
        width = x.shape[-1]
        if gated and width % (2 * (self.glu_interleave_size or 1)):
            raise ValueError(
                f"{kind} splits the last dimension into two halves, so it must be a multiple of "
                f"{2 * (self.glu_interleave_size or 1)} (2 * glu_interleave_size); the input has {width}"
            )
        shape = (*x.shape[:-1], width // 2 if gated else width)
        if self.scaled:
            rows, extra_rows = math.prod(x.shape[:-1]), math.prod(call.extra[0].shape)
            if rows != extra_rows:
                raise ValueError(
                    f"{kind} takes one scale per row, but got scales {list(call.extra[0].shape)} for an input "
                    f"{list(x.shape)}; give scales of shape {list(x.shape[:-1])}"
                )
        cache = None
        if self.cache_quantized_input and call.saves:
            cache = Float8CurrentScalingQuantizer(
                torch.float8_e4m3fn, x.device, rowwise=True, columnwise=False
            )
        result = ActivationPasses(
            self.kind,
            self.activation_params(),
            self.constants(),
            (x.dtype, dtype),
            self.glu_interleave_size,
            cache,
            self.scaled,
            self.scaled and call.saves,
        )
        return result, InputFacts(shape, dtype, x.device)


def interleave_size(size: Any) -> int | None:
    """Return the alternating block size of a gated unit, or None.

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
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.
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
        limit: Bound for the gate and the linear half.
        alpha: Factor within the sigmoid.
        glu_linear_offset: Offset for the linear half.
        cache_quantized_input: Save the input for the backward pass as FP8 codes.
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.
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
        beta1: Gate bound.
        beta2: Linear half bound.
        cache_quantized_input: Save the input for the backward pass as FP8 codes.
        glu_interleave_size: The last dimension alternates blocks of a and b, each this long; None for two halves.

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
