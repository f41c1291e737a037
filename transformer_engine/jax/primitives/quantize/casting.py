"""Cast: how an operation is to quantize its own result."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from ....common.quantize_spec import QuantizeSpec


class Cast(NamedTuple):
    """The spec, and FLOAT8's multiplier [1] where one is given, 0 being read as 1, instead of made from the maximum."""

    spec: QuantizeSpec
    multiplier: Array | None = None
