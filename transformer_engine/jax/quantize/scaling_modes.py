"""Quantization enumerations: scaling modes, directions, usages and tensor sources."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp

from ...common.checks import member, switch
from ...common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    FLOAT8,
    MXFP8,
    NVFP4,
    NVFP4_256,
    NVFP4_FORMATS,
    NVFP4_ROWS,
    NVFP4_ROWS_256,
    TensorFormat,
)


class ScalingMode(enum.Enum):
    """How a tensor is scaled. Values from 100 on are modes that NVIDIA's engine does not have."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5
    BLOCK_1D_SCALING = 100
    BLOCK_2D_SCALING = 101
    MXFP8_2D_SCALING = 102
    # NVFP4 with block scales up to 256, as 4over6 requires, and with one second-level scale per row.
    NVFP4_1D_256_SCALING = 103
    NVFP4_2D_256_SCALING = 104
    NVFP4_ROWS_SCALING = 105
    NVFP4_ROWS_256_SCALING = 106

    @property
    def format(self) -> TensorFormat | None:
        """Code and scale format; None without scaling."""
        return _FORMATS[self]

    @property
    def is_2d(self) -> bool:
        """Whether square tiles share a scale, so that both directions hold the same values."""
        square = (
            self.NVFP4_2D_SCALING,
            self.NVFP4_2D_256_SCALING,
            self.BLOCK_2D_SCALING,
            self.MXFP8_2D_SCALING,
        )
        return self in square

    @property
    def data_layout(self) -> str:
        """ "NT" if the column-wise codes are stored transposed, "NN" if they have the row-wise layout."""
        return "NN" if self.format == MXFP8 else "NT"

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Whether the format is MXFP8."""
        return self.format == MXFP8

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Whether the format is NVFP4 or an NVFP4 variant."""
        return self.format in NVFP4_FORMATS.values()

    @property
    def is_colwise_transposed(self) -> bool:
        """Whether the column-wise codes are stored transposed."""
        return self.data_layout[1] == "T"

    def is_1d_block_scaling(self) -> bool:
        """Whether the elements that share a scale are in one row or one column."""
        return self.is_block_scaling() and not self.is_2d

    def is_tensor_scaling(self) -> bool:
        """Whether the whole tensor shares one scale."""
        return self in (self.DELAYED_TENSOR_SCALING, self.CURRENT_TENSOR_SCALING)

    def is_block_scaling(self) -> bool:
        """Whether each element block has a scale."""
        return self is not self.NO_SCALING and not self.is_tensor_scaling()

    def get_scale_dtype(self) -> Any:
        """Dtype for scale_inv.

        Raises:
            ValueError: The mode is NO_SCALING.
        """
        if self.format is None:
            raise ValueError(f"{self} has no scales; use another mode")
        return _SCALE_DTYPES[self.format.scale]

    def get_compatible_q_dtypes(self) -> tuple[Any, ...]:
        """Data dtypes: the code dtypes, or the high-precision dtypes without scaling."""
        if self.format is None:
            return jnp.float32, jnp.bfloat16, jnp.float16
        return tuple(_CODE_DTYPES[name] for name in self.format.elements)

    def get_quantize_layout(self, usage: TensorUsage) -> QuantizeLayout:
        """Direction that a matrix product reads for a usage: ROWWISE or COLWISE.

        Every product contracts the last axis of both operands, so LHS and RHS_TRANS read the row-wise codes.
        """
        member("usage", usage, TensorUsage)
        rowwise = usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS)
        return QuantizeLayout.ROWWISE if rowwise else QuantizeLayout.COLWISE


_SCALE_DTYPES = {"float32": jnp.float32, "e8m0": jnp.float8_e8m0fnu, "e4m3": jnp.float8_e4m3fn}
_CODE_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}


_FORMATS: dict[ScalingMode, TensorFormat | None] = {
    ScalingMode.NO_SCALING: None,
    ScalingMode.DELAYED_TENSOR_SCALING: FLOAT8,
    ScalingMode.CURRENT_TENSOR_SCALING: FLOAT8,
    ScalingMode.MXFP8_1D_SCALING: MXFP8,
    ScalingMode.MXFP8_2D_SCALING: MXFP8,
    ScalingMode.NVFP4_1D_SCALING: NVFP4,
    ScalingMode.NVFP4_2D_SCALING: NVFP4,
    ScalingMode.NVFP4_1D_256_SCALING: NVFP4_256,
    ScalingMode.NVFP4_2D_256_SCALING: NVFP4_256,
    ScalingMode.NVFP4_ROWS_SCALING: NVFP4_ROWS,
    ScalingMode.NVFP4_ROWS_256_SCALING: NVFP4_ROWS_256,
    ScalingMode.BLOCK_1D_SCALING: BLOCK_1D,
    ScalingMode.BLOCK_2D_SCALING: BLOCK_2D,
}


class QuantizeLayout(enum.Enum):
    """Directions that a quantized tensor stores."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2

    @property
    def has_rowwise(self) -> bool:
        return self is not QuantizeLayout.COLWISE

    @property
    def has_colwise(self) -> bool:
        return self is not QuantizeLayout.ROWWISE

    @property
    def is_rowwise_only(self) -> bool:
        return self is QuantizeLayout.ROWWISE

    @property
    def is_colwise_only(self) -> bool:
        return self is QuantizeLayout.COLWISE

    @property
    def is_rowwise_colwise(self) -> bool:
        return self is QuantizeLayout.ROWWISE_COLWISE


class TensorUsage(enum.Enum):
    """Which matrix-product operand a tensor is, and whether it is transposed."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


class TensorSource(enum.Enum):
    """A linear layer's quantized tensors: input, kernel, and output gradient."""

    X = 0
    KERNEL = 1
    DGRAD = 2


class AmaxComputeAlgo(enum.Enum):
    """Amax history element that determines the scale."""

    MAX = "max"
    MOST_RECENT = "most_recent"


def should_use_rht(
    scaling_mode: ScalingMode,
    is_colwise: bool | None = None,
    q_layout: QuantizeLayout | None = None,
) -> bool:
    """Whether the NVFP4 recipe applies the random Hadamard transform (RHT) before it quantizes.

    The recipe transforms column-wise codes with 1-D blocks for inputs and gradients, unless its disable_rht is True.
    The setting of one quantizer is its `use_rht`.

    Args:
        scaling_mode: Scaling mode.
        is_colwise: Whether the codes are column-wise.
        q_layout: Directions instead of is_colwise; only QuantizeLayout.COLWISE is column-wise.

    Raises:
        ValueError: Both is_colwise and q_layout are passed, or neither.
    """
    member("scaling_mode", scaling_mode, ScalingMode)
    if (is_colwise is None) is (q_layout is None):
        raise ValueError(f"is_colwise={is_colwise} and q_layout={q_layout}; give one of them")
    if q_layout is not None:
        member("q_layout", q_layout, QuantizeLayout)
        is_colwise = q_layout.is_colwise_only
    switch("is_colwise", is_colwise)
    return bool(is_colwise) and scaling_mode.is_nvfp4_scaling and not scaling_mode.is_2d
