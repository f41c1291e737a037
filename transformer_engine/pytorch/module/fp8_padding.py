"""Fp8Padding: appends rows of zeros to each group of rows, so that a recipe can quantize every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...common.numbers import to_ints
from ..compat.argument_orders import exact_call_of
from ..functions.permutation import pad_rows
from ..runtime.autograd import check_transforms
from .row_groups import RowGroups, as_rows


class Fp8Padding(RowGroups):
    """Pad each group of rows with zeros to a multiple, so that a recipe can quantize the groups.

    Args:
        num_gemms: Number of groups.
        align_size: Number of rows to round up to. By default that of the recipe at the first call.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return (y, padded m_splits); x and m_splits themselves if every group is a multiple already.

        Args:
            inp: Rows of all groups [sum of m_splits, K].
            m_splits: Rows of each group.
        """
        check_transforms("Fp8Padding", inp)
        rows = to_ints("m_splits", m_splits)
        padded = self.padded_rows(inp, rows)
        if padded == list(rows):
            return inp, m_splits
        return pad_rows(as_rows(inp, rows, "m_splits"), rows, padded), padded

    if TYPE_CHECKING:

        @exact_call_of(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
