"""RowGroups: what Fp8Padding and Fp8Unpadding share, the number of groups and the multiple that they are padded to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...common.checks import whole, whole_numbers, whole_or_none
from ..functions.row_padding import up_to
from ..quantization import FP8GlobalStateManager, get_align_size_for_quantization
from ..runtime.checks import floating


class RowGroups(nn.Module):
    """num_gemms groups of rows, each padded to a multiple of align_size.

    align_size   None: that of the recipe in force at the first call, which is kept from then on
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        whole("num_gemms", num_gemms)
        whole_or_none("align_size", align_size)
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded_rows(self, inp: Tensor, m_splits: Sequence[int]) -> list[int]:
        """The rows of each group with its padding; TypeError or ValueError unless there is one number >= 0 a group."""
        floating("inp", inp)
        if inp.dim() < 1:
            raise ValueError("inp is []; give rows [.., K]")
        whole_numbers("m_splits", m_splits)
        if len(m_splits) != self.num_gemms or min(m_splits, default=0) < 0:
            raise ValueError(f"m_splits={list(m_splits)} must be {self.num_gemms} numbers >= 0, one a group")
        if self.align_size is None:
            self.align_size = alignment()
        return [up_to(rows, self.align_size) for rows in m_splits]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


def alignment() -> int:
    """The multiple that the recipe in force, or else the default one, asks of a group's rows."""
    return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())


def as_rows(inp: Tensor, rows: Sequence[int], name: str) -> Tensor:
    """inp [.., K] as a matrix; ValueError unless numbers add up to its rows."""
    x = inp.reshape(-1, inp.shape[-1])
    if sum(rows) != x.shape[0]:
        raise ValueError(
            f"{name}={list(rows)} add up to {sum(rows)}, inp has {x.shape[0]} rows; give the rows of each group"
        )
    return x
