"""Activation kinds, their constants, and the activation request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.checks import described, number
from ....common.numbers import to_float, with_article
from ..quantize import CastRequest, QuantizeSpec
from ..quantize.fused_codes import cast_request


@dataclass(frozen=True)
class ActivationKind:
    """y = f(x), or for gated units y [..., F] = f(x[..., :F]) * x[..., F:]."""

    name: str
    gated: bool


ACTIVATIONS: dict[str, ActivationKind] = {
    name: ActivationKind(name, gated)
    for name, gated in (
        ("gelu", False),
        ("geglu", True),
        ("glu", True),
        ("qgelu", False),
        ("qgeglu", True),
        ("relu", False),
        ("reglu", True),
        ("srelu", False),
        ("sreglu", True),
        ("silu", False),
        ("swiglu", True),
        ("clamped_swiglu", True),
    )
}


Constants = tuple[float, float, float]  # limit, alpha, offset


@dataclass(frozen=True)
class ActivationParams:
    """Constants of clamped_swiglu; the other activations have none and ignore them.

    Attributes:
        limit: Bound at which gate and linear half are clamped.
        alpha: Factor in the gate's sigmoid.
        offset: Number added to the linear half.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @property
    def constants(self) -> Constants:
        return self.limit, self.alpha, self.offset

    @classmethod
    def of(cls, params: ActivationParams | Mapping[str, float] | None) -> ActivationParams:
        """Return parameters unchanged, or read them from a dict; see `from_mapping`."""
        return params if isinstance(params, cls) else cls.from_mapping(params)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_mapping(cls, params: Mapping[str, float] | None) -> ActivationParams:
        """Convert a dict with keys `limit`, `alpha`, `glu_linear_offset` or `offset`; other keys raise ValueError."""
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(
                f"activation_params={described(params)} is {with_article(type(params))}; give a dict of limit, alpha "
                "and glu_linear_offset, or None"
            )
        named = dict(params or {})
        aliases = {
            "limit": "limit",
            "alpha": "alpha",
            "glu_linear_offset": "offset",
            "offset": "offset",
        }
        unknown = sorted(set(named) - set(aliases))
        if unknown:
            raise ValueError(
                f"activation_params has no {unknown[0]!r}; choose from {', '.join(aliases)}"
            )
        values = {
            key: to_float(f"activation_params[{key!r}]", value) for key, value in named.items()
        }
        for key, value in values.items():
            number(f"activation_params[{key!r}]", value)
        return cls(**{aliases[key]: value for key, value in values.items()})


DEFAULT_PARAMS = ActivationParams()


class OutputCast(NamedTuple):
    """Column-wise quantization of f(x), by the scale from an earlier quantization of f(x).

    Attributes:
        spec: Target format, FLOAT8 with one scale, and its scaling; column-wise only.
        multiplier: Value multiplier, float32 [1]; None: computed from amax.
        amax: max|f(x)|, float32 [1]; None with a multiplier.
    """

    spec: QuantizeSpec
    multiplier: Tensor | None
    amax: Tensor | None


class MeasuredGradient(NamedTuple):
    """A matrix and its maximum, from the kernel that computed it.

    Attributes:
        values: The matrix.
        amax: max|values|, float32 [1].
    """

    values: Tensor
    amax: Tensor


class ActivationRequest(NamedTuple):
    """One call on x [..., width].

    Attributes:
        name: Activation name.
        backward: Compute the gradient instead of the function.
        dy: Gradient strides and dtype; None in a forward pass.
        dbias: Dtype for the column sums of dx; None: not requested.
        output: `OutputCast` spec, whose codes are computed beside dx; None: not requested.
        encoded: x is codes in blocks of 1 x 128, and scales; `dtype` is the dtype its values represent.
    """

    name: str
    backward: bool
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    constants: Constants = (7.0, 1.702, 1.0)
    dy: tuple[tuple[int, ...], torch.dtype] | None = None
    cast: CastRequest | None = None
    dbias: torch.dtype | None = None
    output: QuantizeSpec | None = None
    encoded: bool = False

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.name].gated

    @property
    def made(self) -> tuple[int, int]:
        """Shape of the cast matrix: f(x), or dx."""
        rows, width = self.shape
        return rows, width // 2 if self.gated and not self.backward else width


def make_request(
    name: str,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    constants: Constants,
    dy: tuple[tuple[int, ...], torch.dtype] | None = None,
    spec: QuantizeSpec | None = None,
    has_multiplier: bool = False,
    records: bool = False,
    dbias: torch.dtype | None = None,
    output: QuantizeSpec | None = None,
    encoded: bool = False,
) -> ActivationRequest:
    """Return the request for a key; spec, has_multiplier and records describe the cast, output the cast of f(x).

    Raises:
        ValueError: The name is unknown, or a gated unit has an odd width.
    """
    activation = ACTIVATIONS.get(name)
    if activation is None:
        raise ValueError(f"unknown activation {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    if activation.gated and shape[-1] % 2:
        raise ValueError(
            f"{name} halves the last dimension, and {shape[-1]} is odd; "
            "give it [..., 2F], activated half first"
        )
    backward = dy is not None
    request = ActivationRequest(name, backward, shape, strides, dtype, device, constants, dy)
    request = request._replace(output=output, encoded=encoded)
    if spec is None:
        return request
    matrix = request.made if len(shape) == 2 else (0, 0)  # `quantize` rejects other shapes
    cast = cast_request(matrix, dtype, device, spec, has_multiplier, records)
    return request._replace(cast=cast, dbias=dbias)
