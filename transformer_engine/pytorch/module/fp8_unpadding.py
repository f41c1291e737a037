"""Fp8Unpadding: takes away the rows that Fp8Padding put behind each group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..functions.row_padding import unpad_rows
from .row_groups import RowGroups, as_rows


class Fp8Unpadding(RowGroups):
    """y [sum of m_splits, K]: the first rows of each group of x, whose groups are padded to a multiple.

    num_gemms    number of groups
    align_size   the multiple; None: that of the recipe in force at the first call, which is kept from then on
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """m_splits: rows of each group without its padding. x itself where there is none."""
        padded = self.padded_rows(inp, m_splits)
        if padded == list(m_splits):
            return inp
        return unpad_rows(as_rows(inp, padded, "the padded m_splits"), m_splits, padded)
