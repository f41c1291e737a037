"""Fp8Unpadding: takes away the rows that Fp8Padding put behind each group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...common.checks import whole, whole_or_none
from ..functions.row_padding import unpad_rows, up_to
from .fp8_padding import alignment, check_rows, check_splits


class Fp8Unpadding(nn.Module):
    """y [sum of m_splits, K]: the first rows of each group of x, whose groups are padded to a multiple.

    num_gemms    number of groups
    align_size   the multiple; None: that of the recipe in force at the first call, which is kept from then on
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        whole("num_gemms", num_gemms)
        whole_or_none("align_size", align_size)
        self.num_gemms = num_gemms
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """m_splits: rows of each group without its padding. x itself where there is none."""
        check_splits(inp, m_splits, self.num_gemms)
        self.align_size = alignment(self.align_size)
        padded = [up_to(rows, self.align_size) for rows in m_splits]
        if padded == list(m_splits):
            return inp
        x = inp.reshape(-1, inp.shape[-1])
        check_rows(x, padded, "the padded m_splits")
        return unpad_rows(x, m_splits, padded)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"
