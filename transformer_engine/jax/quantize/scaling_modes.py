"""The vocabulary of quantization: which scaling, which directions, which operand of which product."""

from __future__ import annotations

import enum

from ...common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    FLOAT8,
    MXFP8,
    NVFP4,
    NVFP4_256,
    NVFP4_ROWS,
    NVFP4_ROWS_256,
    TensorFormat,
)


class ScalingMode(enum.Enum):
    """How scales are made; the values of the original's enum, and behind them the modes that are ours."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5
    BLOCK_1D_SCALING = 100
    BLOCK_2D_SCALING = 101
    MXFP8_2D_SCALING = 102
    # Block scales of NVFP4 up to 256, which leaves 4over6 room, and a second-level scale per row.
    NVFP4_1D_256_SCALING = 103
    NVFP4_2D_256_SCALING = 104
    NVFP4_ROWS_SCALING = 105
    NVFP4_ROWS_256_SCALING = 106

    @property
    def format(self) -> TensorFormat | None:
        """How codes and scales of this mode lie; None without scaling."""
        return _FORMATS[self]

    @property
    def is_2d(self) -> bool:
        """Do square tiles share a scale, so that both directions hold the same values?"""
        square = (
            self.NVFP4_2D_SCALING,
            self.NVFP4_2D_256_SCALING,
            self.BLOCK_2D_SCALING,
            self.MXFP8_2D_SCALING,
        )
        return self in square

    @property
    def data_layout(self) -> str:
        """ "NT": the column copy is transposed; "NN": it lies as the row copy does."""
        return "NN" if self.format == MXFP8 else "NT"

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Is the format MXFP8?"""
        return self.format == MXFP8

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Is the format NVFP4?"""
        return self.format == NVFP4

    @property
    def is_colwise_transposed(self) -> bool:
        """Is the column-wise copy stored transposed?"""
        return self.data_layout[1] == "T"

    def is_1d_block_scaling(self) -> bool:
        """Return whether each block lies in one row or column."""
        return self.is_block_scaling() and not self.is_2d

    def is_tensor_scaling(self) -> bool:
        """Has the whole tensor one scale?"""
        return self in (self.DELAYED_TENSOR_SCALING, self.CURRENT_TENSOR_SCALING)

    def is_block_scaling(self) -> bool:
        """Has each block of elements a scale?"""
        return self is not self.NO_SCALING and not self.is_tensor_scaling()


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
    """Which directions of a tensor are kept."""

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
    """The part that a tensor has in a product, and whether it is transposed for it."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


class TensorSource(enum.Enum):
    """The three tensors of a linear layer that are quantized."""

    X = 0
    KERNEL = 1
    DGRAD = 2


class AmaxComputeAlgo(enum.Enum):
    """Which maximum of a history a scale is made from."""

    MAX = "max"
    MOST_RECENT = "most_recent"
