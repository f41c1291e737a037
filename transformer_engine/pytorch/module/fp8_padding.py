"""Fp8Padding: rows of zeros behind each group of rows, so that a recipe can quantize every group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..functions.row_padding import pad_rows
from .row_groups import RowGroups, as_rows


class Fp8Padding(RowGroups):
    """y [sum of padded m_splits, K]: group i of x [sum of m_splits, K], and rows of zeros up to a multiple.

    num_gemms    number of groups
    align_size   the multiple; None: that of the recipe in force at the first call, which is kept from then on
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """(y, padded m_splits); x and m_splits themselves where every group is a multiple already."""
        padded = self.padded_rows(inp, m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        return pad_rows(as_rows(inp, m_splits, "m_splits"), m_splits, padded), padded
