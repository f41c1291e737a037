"""Fp8Padding: appends zero rows to each row group, so that a recipe can quantize every group."""

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
    """Pad each row group with zeros to a multiple, so that a recipe can quantize the groups.

    Args:
        num_gemms: Group count.
        align_size: Row multiple to round up to. By default the recipe's at the first call.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return (y, padded m_splits); x and m_splits themselves if every group is a multiple already.

        Args:
            inp: Rows in all groups [sum of m_splits, K].
            m_splits: Rows per group.
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
