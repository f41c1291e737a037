"""Fp8Unpadding: removes the rows that Fp8Padding appended to each group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..functions.row_padding import unpad_rows
from .row_groups import RowGroups, as_rows, rows_of_groups


class Fp8Unpadding(RowGroups):
    """y [sum of m_splits, K]: the first rows of each group of x, whose groups are padded to a multiple.

    num_gemms    number of groups
    align_size   the multiple; None: that of the recipe in force at the first call, which is kept from then on
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """Return the groups without their padding; x itself if no group is padded.

        Args:
            inp: Padded groups [sum of padded m_splits, K].
            m_splits: Rows of each group without its padding.
        """
        rows = rows_of_groups(m_splits)
        padded = self.padded_rows(inp, rows)
        if padded == list(rows):
            return inp
        return unpad_rows(as_rows(inp, padded, "the padded m_splits"), rows, padded)
