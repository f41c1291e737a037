"""Recipe parts: element formats, and parameters for casts and matrix products."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..checks import number
from ..numbers import parse_bool, parse_float, parse_int
from .field_checks import convert_fields, instance_of_fields, member_of_value
from .living import construct_as_constant


class _FormatHelper(NamedTuple):
    """Largest finite magnitudes in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Element formats; HYBRID is E4M3 in the forward pass and E5M2 in the backward pass."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)

    def __repr__(self) -> str:
        return f"Format.{self.name}"


@construct_as_constant
@dataclass(frozen=True, repr=False)
class MMParams:
    """Parameters for a matrix product.

    Args:
        use_split_accumulator: Add partial sums in full float32 precision.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        convert_fields(self, CONVERTERS)

    def __repr__(self) -> str:
        return describe_fields(self)


@construct_as_constant
@dataclass(frozen=True, repr=False)
class QParams:
    """How a recipe quantizes one type of tensor.

    Args:
        power_2_scale: Round scales down to powers of two.
        amax_epsilon: Least absolute maximum, which scales are computed from.
        random_hadamard_transform: Transform 16 consecutive values before the cast (NVFP4).
        stochastic_rounding: Round to a neighboring code at random (NVFP4).
        fp4_2d_quantization: Share a scale over 16 x 16 values instead of 16 (NVFP4).
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, CONVERTERS)
        number("QParams: amax_epsilon", self.amax_epsilon)

    def __repr__(self) -> str:
        return describe_fields(self)


CONVERTERS = {  # by the type that a field declares
    "int": parse_int,
    "float": parse_float,
    "bool": parse_bool,
    "Format": member_of_value(Format),
    "MMParams": instance_of_fields(MMParams),
}


def describe_fields(record: Any) -> str:
    """Name(field=value, ...), written out because torch.compile cannot trace the generated repr."""
    values = [f"{f.name}={getattr(record, f.name)!r}" for f in fields(record)]
    return f"{type(record).__name__}({', '.join(values)})"


# Pickles name these classes by the package, as in NVIDIA's engine.
for _part in (_FormatHelper, Format, MMParams, QParams):
    _part.__module__ = __name__.rpartition(".")[0]
